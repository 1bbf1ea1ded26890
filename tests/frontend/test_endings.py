"""However a call ends, the core is told at once and nothing of the call stays behind."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from shared.pb import generation_pb2 as pb
from shared.pb import generation_pb2_grpc
from shared.rpc import make_channel
from tests.frontend.fake_core import length, until
from tests.frontend.harness import Served, collect, run, serving


def _generate(served: Served, text: str = "The quick", **options: Any) -> Any:
    return served.stub.Generate(pb.GenerateRequest(text=text, request_id="r"), **options)


async def _cancelled_at_the_core(served: Served) -> None:
    await until(lambda: served.core.cancelled == [submit.handle for submit in served.core.submits])


def test_a_client_that_cancels_in_the_stream(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            call = _generate(served)
            (submit,) = await served.core.submitted()
            served.core.give(submit, [5])
            await call.read()
            call.cancel()
            await _cancelled_at_the_core(served)

    run(scenario())


def test_a_client_that_cancels_before_anything_came(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            call = _generate(served)
            await served.core.submitted()
            call.cancel()
            await _cancelled_at_the_core(served)

    run(scenario())


def test_a_client_that_cancels_while_its_prompt_is_tokenized(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            call = _generate(served, "word " * 200_000)
            await until(lambda: served.frontend.service.live == 1)
            call.cancel()
            await served.idle()
            assert served.core.submits == []

    run(scenario())


def test_a_client_that_cancels_without_having_read(model: Path) -> None:
    """The call's writer waits for the client's window then."""

    async def scenario() -> None:
        async with serving(model) as served:
            call = _generate(served)
            (submit,) = await served.core.submitted()
            for _ in range(200):
                served.core.give(submit, [5] * 1000)
                await asyncio.sleep(0)
            await until(lambda: served.frontend.link.held > 0)
            call.cancel()
            await _cancelled_at_the_core(served)

    run(scenario())


def test_a_client_whose_connection_breaks(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            channel = make_channel(f"127.0.0.1:{served.frontend.port}")
            calls = [
                generation_pb2_grpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(text="a", n=2))
                for _ in range(3)
            ]
            await served.core.submitted(6)
            await channel.close()
            await until(lambda: len(served.core.cancelled) == 6)
            assert all(call.done() for call in calls)

    run(scenario())


def test_a_deadline_that_passes(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            call = _generate(served, timeout=0.5)
            (submit,) = await served.core.submitted()
            served.core.give(submit, [5])
            with pytest.raises(aio.AioRpcError) as error:
                await collect(call)
            assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            await _cancelled_at_the_core(served)

    run(scenario())


def test_abort_by_id_ends_the_stream_cancelled(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            call = _generate(served)
            await served.core.submitted()
            assert (await served.stub.Abort(pb.AbortRequest(request_id="r"))).found
            assert not (await served.stub.Abort(pb.AbortRequest(request_id="other"))).found
            with pytest.raises(aio.AioRpcError) as error:
                await collect(call)
            assert error.value.code() == grpc.StatusCode.CANCELLED
            assert served.core.aborted == ["r", "other"]
            with pytest.raises(aio.AioRpcError, match="request_id: must not be empty"):
                await served.stub.Abort(pb.AbortRequest())

    run(scenario())


def test_tokens_that_arrive_after_a_cancel_are_dropped(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            call = _generate(served)
            (submit,) = await served.core.submitted()
            call.cancel()
            await _cancelled_at_the_core(served)
            served.core.give(submit, [5], length())
            other = _generate(served)
            (submit,) = (await served.core.submitted(2))[-1:]
            served.core.give(submit, [6], length())
            assert [list(r.token_ids) for r in await collect(other)] == [[6]]

    run(scenario())
