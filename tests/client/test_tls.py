"""TLS is a matter of gRPC's own credentials: both clients reach a server that speaks nothing else."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import trustme

from shared.pb import generation_pb2 as pb
from shared.pb import generation_pb2_grpc
from tandem import AsyncClient, Client, Unavailable
from tests.patience import PATIENCE_S


class Echo(generation_pb2_grpc.GenerationServiceServicer):
    """Answers with the prompt."""

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        finish = pb.Finish(reason=pb.FINISH_REASON_LENGTH)
        yield pb.GenerateResponse(request_id=request.request_id, text=request.text, finish=finish, usage=pb.Usage())


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def endpoint(authority: trustme.CA) -> Iterator[str]:
    """A server with a certificate for 127.0.0.1 that demands one of its clients."""
    certificate = authority.issue_cert("127.0.0.1")
    pair = (certificate.private_key_pem.bytes(), certificate.cert_chain_pems[0].bytes())
    credentials = grpc.ssl_server_credentials([pair], authority.cert_pem.bytes(), require_client_auth=True)
    server = grpc.server(ThreadPoolExecutor(2))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Echo(), server)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def test_both_clients_speak_tls_with_a_certificate_of_their_own(authority: trustme.CA, endpoint: str) -> None:
    mine = authority.issue_cert("client.example")
    credentials = grpc.ssl_channel_credentials(
        authority.cert_pem.bytes(), mine.private_key_pem.bytes(), mine.cert_chain_pems[0].bytes()
    )
    with Client(endpoint, credentials=credentials) as client:
        assert client.complete("fox").text == "fox"

    async def scenario() -> str:
        async with AsyncClient(endpoint, credentials=credentials) as client:
            return (await client.complete("fox")).text

    assert asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S)) == "fox"


@pytest.mark.parametrize("knows", ["nothing", "another authority"])
def test_who_does_not_trust_the_server_gets_no_answer(endpoint: str, knows: str) -> None:
    other = grpc.ssl_channel_credentials(trustme.CA().cert_pem.bytes())
    with Client(endpoint, credentials=None if knows == "nothing" else other) as client, pytest.raises(Unavailable):
        client.complete("fox", timeout=10)
