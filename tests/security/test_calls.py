"""TLS and tokens of a frontend, in one process: both of its services, both clients, and what each mistake is told."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from shared.dialer import Dialer
from shared.pb import generation_pb2 as pb
from shared.pb import generation_pb2_grpc
from shared.ports import find_free
from shared.rpc import until_serving
from shared.security import PLAIN, ClientSecurity
from tandem import AsyncClient, Client, InvalidRequest, LimitExceeded, RequestFailed, Unauthenticated, Unavailable
from tests.frontend.conftest import model, tokenizer
from tests.frontend.fake_core import length
from tests.frontend.harness import Served, run, serving
from tests.security.authority import LONG_AGO, Authority, client, server

__all__ = ["model", "tokenizer"]

TOKEN, RED, BLUE = "operator" * 2, "red" * 6, "blue" * 4


def answer(submit: Any) -> Any:
    return [7, 8], length()


def served_with(model: Path, scenario: Callable[[str, Served], Awaitable[None]], **settings: Any) -> None:
    async def all_of_it() -> None:
        async with serving(model, answer, **settings) as served:
            await scenario(f"127.0.0.1:{served.frontend.port}", served)

    run(all_of_it())


async def ask(endpoint: str, security: ClientSecurity) -> list[int]:
    """By both clients."""

    def in_a_thread() -> list[int]:
        with Client(endpoint, 1, security=security) as client:
            return list(client.complete("a", timeout=20).samples[0].token_ids)

    async with AsyncClient(endpoint, 1, security=security) as client:
        token_ids = list((await client.complete("a", timeout=20)).samples[0].token_ids)
    assert await asyncio.to_thread(in_a_thread) == token_ids
    return token_ids


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.mark.parametrize("mutual", [False, True])
def test_both_clients_and_both_services_speak_tls(model: Path, authority: Authority, mutual: bool) -> None:
    security = client(authority, "client" if mutual else None)

    async def scenario(endpoint: str, served: Served) -> None:
        assert await ask(endpoint, security) == [7, 8]
        async with Dialer(security).channel(endpoint) as channel:
            engine: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            assert (await engine.HealthCheck(vllm.HealthCheckRequest())).healthy

    served_with(model, scenario, **asdict(server(authority, mutual=mutual)))


@pytest.mark.parametrize(
    ("mistake", "hint"),
    [
        ("plain text", "speaks TLS"),
        ("a certificate of another authority", "does its --tls-client-ca accept"),
        ("another authority", "not signed by an authority of --tls-ca"),
        ("no certificate", "--tls-cert"),
        ("another name", "dial that one, or give it as --tls-server-name"),
    ],
)
def test_a_client_that_gets_no_connection_is_told_why(
    model: Path, authority: Authority, mistake: str, hint: str
) -> None:
    (authority.folder / "other").mkdir()
    security = {
        "plain text": PLAIN,
        "another authority": client(Authority(authority.folder / "other")),
        "no certificate": client(authority),
        "a certificate of another authority": replace(
            client(Authority(authority.folder / "other"), "client"), tls_ca=authority.file
        ),
        "another name": client(authority, "client", tls_server_name="elsewhere"),
    }[mistake]

    async def scenario(endpoint: str, served: Served) -> None:
        with pytest.raises(Unavailable, match=hint):
            await ask(endpoint, security)

    served_with(model, scenario, **asdict(server(authority, mutual=True)))


def test_a_client_in_tls_before_a_server_in_plain_text_is_told_so(model: Path, authority: Authority) -> None:
    async def scenario(endpoint: str, served: Served) -> None:
        with pytest.raises(Unavailable, match="speaks plain text: leave --tls-ca out"):
            await ask(endpoint, client(authority))

    served_with(model, scenario)


def test_an_expired_certificate_is_told_and_a_new_one_counts_at_once(authority: Authority) -> None:
    """By another server: Tandem's begins with no such one. The client's channel is old: it dials again."""
    authority.sign("server", **LONG_AGO)

    def current() -> grpc.ServerCertificateConfiguration:
        pair = [(authority.folder / f"server.{kind}").read_bytes() for kind in ("key", "pem")]
        return grpc.ssl_server_certificate_configuration([(pair[0], pair[1])])

    async def scenario() -> None:
        elsewhere = aio.server()
        port = elsewhere.add_secure_port("127.0.0.1:0", grpc.dynamic_ssl_server_credentials(current(), current))
        await elsewhere.start()
        async with AsyncClient(f"127.0.0.1:{port}", 1, security=client(authority)) as asking:
            with pytest.raises(Unavailable, match="has expired"):
                await asking.model_info()
            authority.sign("server")
            while True:  # gRPC pauses before it dials again
                try:
                    await asking.model_info()
                except Unavailable:
                    await asyncio.sleep(0.05)
                except RequestFailed:
                    break  # it was reached, and has no such method
        await elsewhere.stop(0)

    run(scenario())


def test_a_certificate_for_another_name_is_taken_for_that_name(model: Path, authority: Authority) -> None:
    security = server(authority)
    authority.sign("server", "tandem.example")

    async def scenario(endpoint: str, served: Served) -> None:
        assert await ask(endpoint, client(authority, tls_server_name="tandem.example")) == [7, 8]

    served_with(model, scenario, **asdict(security))


def test_streams_live_on_while_a_client_takes_new_channels(model: Path, authority: Authority) -> None:
    """Its old channel is gone with the last stream on it."""

    async def scenario(endpoint: str, served: Served) -> None:
        async with AsyncClient(endpoint, 1, security=client(authority, "client")) as asking:
            old = asking.generate("a")
            (submit,) = await served.core.submitted()
            served.core.give(submit, [7])
            reading = aiter(old)
            assert (await anext(reading)).token_ids == (7,)
            authority.sign("client", "client.example")
            new = asking.generate("a")
            (_, second) = await served.core.submitted(2)
            assert len(asking._connections.channels) == 2
            served.core.give(submit, [8], length())
            assert (await anext(reading)).token_ids == (8,)
            assert [delta async for delta in reading] == []
            del old, reading
            gc.collect()
            assert len(asking._connections.channels) == 1
            served.core.give(second, [9], length())
            assert [delta.token_ids async for delta in new] == [(9,)]

    async def all_of_it() -> None:
        async with serving(model, **asdict(server(authority, mutual=True))) as served:
            await scenario(f"127.0.0.1:{served.frontend.port}", served)

    run(all_of_it())


def test_probes_that_speak_no_tls_have_a_port_with_nothing_else(model: Path, authority: Authority) -> None:
    port = find_free("127.0.0.1")

    async def scenario(endpoint: str, served: Served) -> None:
        await until_serving(f"127.0.0.1:{port}", "tandem.Active")
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(aio.AioRpcError) as error:
                await generation_pb2_grpc.GenerationServiceStub(channel).GetLoad(pb.GetLoadRequest())
            assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED

    served_with(model, scenario, health_port=port, **asdict(server(authority, mutual=True)))


@pytest.fixture
def tokens(tmp_path: Path) -> Callable[[str], ClientSecurity]:
    """Writes the server's file; gives a client that shows a token."""
    (tmp_path / "tokens").write_text(f"{TOKEN}\nred {RED}\nblue {BLUE}\n")

    def showing(token: str) -> ClientSecurity:
        (tmp_path / token).write_text(token)
        return ClientSecurity(token_file=tmp_path / token)

    return showing


def test_all_but_health_needs_a_token(model: Path, tmp_path: Path, tokens: Any) -> None:
    async def scenario(endpoint: str, served: Served) -> None:
        assert await ask(endpoint, tokens(RED)) == [7, 8]
        for security in (PLAIN, tokens("nobody" * 3)):
            with pytest.raises(Unauthenticated, match="--token-file"):
                await ask(endpoint, security)
        async with aio.insecure_channel(endpoint) as channel:
            assert (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            engine: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            question = reflection_pb2.ServerReflectionRequest(list_services="")
            refused = (
                reflection.ServerReflectionInfo(iter([question])).read(),
                engine.GetModelInfo(vllm.GetModelInfoRequest()),
                engine.GetTokenizer(common.GetTokenizerRequest()).read(),
                channel.unary_unary("/tandem.v1.GenerationService/NoSuchMethod")(b""),
            )
            for call in refused:
                with pytest.raises(aio.AioRpcError) as error:
                    await call
                assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED

    served_with(model, scenario, token_file=tmp_path / "tokens")


def test_the_vllm_protocol_keeps_tenants_apart_too(model: Path, tmp_path: Path, tokens: Any) -> None:
    async def scenario(endpoint: str, served: Served) -> None:
        for token, expected in ((RED, "red/"), (BLUE, "blue/"), (TOKEN, "")):
            dialer = Dialer(tokens(token))
            async with dialer.channel(endpoint) as channel:
                engine: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
                request = vllm.GenerateRequest(request_id="one", text="a")
                responses = [r async for r in engine.Generate(request, metadata=dialer.metadata)]
                assert responses
                submit = served.core.submits[-1]
                assert (submit.request_id, submit.cache_salt) == (f"{expected}one", expected)
                flushing = engine.FlushCache(common.FlushCacheRequest(), metadata=dialer.metadata)
                if expected:
                    with pytest.raises(aio.AioRpcError) as error:
                        await flushing
                    assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
                    following = engine.SubscribeKvEvents(common.SubscribeKvEventsRequest(), metadata=dialer.metadata)
                    with pytest.raises(aio.AioRpcError) as error:
                        await following.read()
                    assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED

    served_with(model, scenario, token_file=tmp_path / "tokens")


def test_a_message_that_is_too_large_is_the_callers_mistake(model: Path) -> None:
    async def scenario(endpoint: str, served: Served) -> None:
        async with AsyncClient(endpoint, 1) as asking:
            with pytest.raises(LimitExceeded, match="larger than max"):
                await asking.tokenize("a" * (9 << 20))
            with pytest.raises(InvalidRequest, match="text: "):
                await asking.tokenize("a" * (5 << 20))

    served_with(model, scenario)
