"""What comes in masses, or is much too long, is turned away at the door; whoever else is served does not notice."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from shared.pb import generation_pb2 as pb
from shared.pb import generation_pb2_grpc
from tests.frontend.fake_core import length, until
from tests.frontend.harness import collect, run, serving


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed it; reads what it has said."""
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def test_ten_megabytes_of_prompt_are_refused_unread(model: Path) -> None:
    """The call's neighbours on the same connection go on. Gzip bombs count by what they become."""

    async def scenario() -> None:
        async with serving(model) as served:
            running = served.stub.Generate(pb.GenerateRequest(text="a"))
            (submit,) = await served.core.submitted()
            for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
                with pytest.raises(aio.AioRpcError, match="larger than max") as error:
                    request = pb.GenerateRequest(text="a" * 10_000_000)
                    await collect(served.stub.Generate(request, compression=compression))
                assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            with pytest.raises(aio.AioRpcError, match="text: has 5000000 bytes; at most 4194304") as error:
                await collect(served.stub.Generate(pb.GenerateRequest(text="a" * 5_000_000)))
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            served.core.give(submit, [7], length())
            assert [list(r.token_ids) for r in await collect(running)] == [[7]]
            assert len(served.core.submits) == 1

    run(scenario())


def test_a_flood_of_connections_is_cut_and_who_is_connected_goes_on(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model, lambda submit: ((7,), length()), max_connections=50) as served:
            assert await tokens(served.stub) == [7]
            flood = [socket.create_connection(("127.0.0.1", served.frontend.port)) for _ in range(200)]
            for connection in flood:
                connection.setblocking(False)
            await until(lambda: sum(map(is_closed, flood)) >= 150)
            assert await tokens(served.stub) == [7]
            for connection in flood:
                connection.close()
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 200)]
            async with aio.insecure_channel(f"127.0.0.1:{served.frontend.port}", options=options) as channel:
                await asyncio.wait_for(channel.channel_ready(), 5)
                assert await tokens(generation_pb2_grpc.GenerationServiceStub(channel)) == [7]

    run(scenario())


def test_a_burst_of_calls_is_served_whole(model: Path) -> None:
    """gRPC's servers cancel what comes beyond a few thousand calls that nobody has looked at."""

    async def scenario() -> None:
        async with serving(model, lambda submit: ((7,), length())) as served:
            calls = [served.stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]))) for _ in range(3300)]
            answers = await asyncio.gather(*(collect(call) for call in calls))
            assert all([list(r.token_ids) for r in answer] == [[7]] for answer in answers)

    run(scenario())


async def tokens(stub: Any) -> list[int]:
    return [token for r in await collect(stub.Generate(pb.GenerateRequest(text="a"))) for token in r.token_ids]


@pytest.mark.parametrize(("allowed", "expected"), [(4096, "4096 4096"), (100, "only 100 open files")])
def test_as_many_files_are_open_as_are_allowed(allowed: int, expected: str) -> None:
    """A shell's limit of 1,024 would be 1,024 connections."""
    code = (
        f"import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (64, {allowed}));"
        "from scheduler_svc.frontend.main import OWN_FILES, _files_for_connections as files;"
        "print(files() + OWN_FILES, r.getrlimit(r.RLIMIT_NOFILE)[0])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert expected in result.stdout + result.stderr
