"""A client that does not read costs bounded memory and a bounded time, and nobody else notices."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from scheduler_svc.frontend import generation
from shared.pb import core_pb2, generation_pb2_grpc
from shared.pb import generation_pb2 as pb
from tests.frontend.fake_core import length, until
from tests.frontend.harness import Served, collect, rest, run, serving

WORD = [5] * 4000
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
"""Of a client, which else takes megabytes before anybody reads them."""


@asynccontextmanager
async def unread(served: Served, **fields: Any) -> AsyncIterator[Any]:
    """A call that nobody reads yet."""
    async with aio.insecure_channel(f"127.0.0.1:{served.frontend.port}", options=SMALL_WINDOW) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        yield stub.Generate(pb.GenerateRequest(text="a", **fields))


async def flood(served: Served, submit: core_pb2.Submit, tokens: int) -> None:
    """Output of one sequence, faster than anybody reads; only as far as it is wanted."""
    for _ in range(tokens // len(WORD)):
        if submit.handle in served.core.cancelled:
            return
        served.core.give(submit, WORD)
        await asyncio.sleep(0.001)


async def status_of(call: Any) -> tuple[grpc.StatusCode, str, int]:
    """How it ended, and the tokens before that."""
    tokens = 0
    with pytest.raises(aio.AioRpcError) as error:
        while (response := await call.read()) is not aio.EOF:
            tokens += len(response.token_ids)
    return error.value.code(), error.value.details() or "", tokens


def test_who_never_reads_is_ended_in_time_and_holds_up_nobody(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model, read_timeout=1.0) as served, unread(served, request_id="deaf") as call:
            (submit,) = await served.core.submitted()
            await flood(served, submit, 60_000)
            other = served.stub.Generate(pb.GenerateRequest(text="a", request_id="other"))
            (wanted,) = (await served.core.submitted(2))[-1:]
            served.core.give(wanted, [7], length())
            assert [list(r.token_ids) for r in await collect(other)] == [[7]]
            await until(lambda: served.core.cancelled == [submit.handle])
            await served.idle()
            code, problem, tokens = await status_of(call)
            assert (code, "has not read for 1 s" in problem) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
            assert 0 < tokens <= 60_000, "what was written before it may still be read"
            (stats,) = [stats for stats in served.core.requests_ended if stats.request_id == "deaf"]
            assert stats.outcome == "resource_exhausted"

    run(scenario())


def test_output_that_is_not_read_is_bounded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MOST_UNREAD_BYTES", 64 * 20_000)

    async def scenario() -> None:
        async with serving(model) as served, unread(served) as call:
            (submit,) = await served.core.submitted()
            await flood(served, submit, 400_000)
            await until(lambda: served.core.cancelled == [submit.handle])  # the core computes no more of it
            code, problem, tokens = await status_of(call)
            assert (code, "no more are kept" in problem) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
            assert tokens >= 20_000, "what has gathered is given"

    run(scenario())


def test_what_is_read_makes_room_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MOST_UNREAD_BYTES", 64 * 6_000)

    async def scenario() -> None:
        async with serving(model) as served:
            call = served.stub.Generate(pb.GenerateRequest(text="a"))
            (submit,) = await served.core.submitted()
            for _ in range(10):
                served.core.give(submit, WORD)
                tokens = 0
                while tokens < len(WORD):
                    tokens += len((await call.read()).token_ids)
            served.core.give(submit, [], length())
            assert [len(response.token_ids) for response in await rest(call)] == [0]

    run(scenario())
