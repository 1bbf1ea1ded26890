"""The core may die: streams stay open and go on, with no token lost or doubled."""

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc import aio
from tokenizers import Tokenizer

from shared.pb import core_pb2
from shared.pb import generation_pb2 as pb
from tests.frontend.fake_core import UPTIME_S, ids, length, until
from tests.frontend.harness import collect, rest, run, serving


def test_live_requests_are_submitted_again_with_their_output_so_far(model: Path, tokenizer: Tokenizer) -> None:
    """Half an emoji is among it: what the client has not seen yet counts too."""
    output = tokenizer.encode("fox 🙂 sea").ids
    cut = next(i for i in range(1, len(output)) if tokenizer.decode(output[:i]).endswith("�"))

    async def scenario() -> None:
        async with serving(model) as served:
            call = served.stub.Generate(pb.GenerateRequest(text="The", request_id="r"))
            (before,) = await served.core.submitted()
            served.core.give(before, output[:cut], cached_tokens=3)
            first = await call.read()
            served.core.die()
            await until(lambda: served.frontend.link.state is None)
            await served.core.start()
            (after,) = (await served.core.submitted(2))[-1:]
            assert ids(after.output) == output[:cut]
            assert after.again, "a full queue must not refuse it"
            after.output, after.again, before.handle = b"", False, after.handle
            assert after == before
            served.core.give(after, output[cut:], length(), cached_tokens=0)
            responses = [first, *await rest(call)]
            assert "".join(r.text for r in responses) == "fox 🙂 sea"
            assert [token for r in responses for token in r.token_ids] == output
            assert responses[-1].usage.cached_tokens == 3

    run(scenario())


def test_a_request_that_arrives_while_the_core_is_away_waits_for_it(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model, lambda submit: ([7], length())) as served:
            served.core.die()
            await until(lambda: served.frontend.link.state is None)
            call = served.stub.Generate(pb.GenerateRequest(text="The"))
            await until(lambda: served.frontend.service.live == 1)
            await served.core.start()
            assert [list(r.token_ids) for r in await collect(call)] == [[7]]

    run(scenario())


def test_a_core_that_stays_away_ends_waiting_and_running_requests(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model, core_timeout=0.3) as served:
            running = served.stub.Generate(pb.GenerateRequest(text="The"))
            (submit,) = await served.core.submitted()
            served.core.give(submit, [7])
            await running.read()
            served.core.die()
            await until(lambda: served.frontend.link.state is None)
            waiting = served.stub.Generate(pb.GenerateRequest(text="The"))
            for stream in (rest(running), collect(waiting)):
                with pytest.raises(aio.AioRpcError, match="has been away") as error:
                    await stream
                assert error.value.code() == grpc.StatusCode.UNAVAILABLE
            with pytest.raises(aio.AioRpcError, match="restarts"):
                await served.stub.GetLoad(pb.GetLoadRequest())

    run(scenario())


def test_statistics_wait_for_the_core_and_not_for_its_first_worker(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            link = served.frontend.link
            link._model = core_pb2.ServedModel()
            served.core.die()
            await until(lambda: link.state is None)
            asked = asyncio.create_task(link.stats(0))
            await asyncio.sleep(0)
            served.core.state = core_pb2.CoreState()
            await served.core.start()
            assert (await asked).uptime_s == UPTIME_S

    run(scenario())


def test_a_request_cancelled_while_the_core_is_away_is_not_submitted_again(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            call = served.stub.Generate(pb.GenerateRequest(text="The"))
            await served.core.submitted()
            served.core.die()
            await until(lambda: served.frontend.link.state is None)
            call.cancel()
            await served.idle()
            await served.core.start()
            await until(lambda: served.frontend.link.state is not None)
            assert len(served.core.submits) == 1

    run(scenario())


def test_an_abort_whose_answer_the_core_takes_to_its_grave_is_unavailable(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            served.core.answer_aborts = False
            call = served.stub.Abort(pb.AbortRequest(request_id="r"))
            await until(lambda: served.core.aborted == ["r"])
            served.core.die()
            with pytest.raises(aio.AioRpcError) as error:
                await call
            assert error.value.code() == grpc.StatusCode.UNAVAILABLE

    run(scenario())


def test_the_first_model_is_waited_for_and_later_states_may_lack_it(model: Path) -> None:
    """A core that has just restarted does not know its workers yet; requests are its matter already."""

    async def scenario() -> None:
        async with serving(model, lambda submit: ([7], length())) as served:
            known = served.core.state
            served.core.tell(core_pb2.CoreState())
            await until(lambda: served.frontend.link.state == core_pb2.CoreState())
            info = await served.stub.GetModelInfo(pb.GetModelInfoRequest())
            assert info.max_context_length == known.model.context_limit
            assert len(await collect(served.stub.Generate(pb.GenerateRequest(text="The")))) == 1
            await asyncio.sleep(0)

    run(scenario())
