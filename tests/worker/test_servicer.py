"""WorkerService over real gRPC: the plan log in order, and what does not follow ends a stream, never the worker."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from grpc import StatusCode, aio

from shared.errors import InvalidRequest
from shared.model_config import load_model_config
from shared.pb import worker_pb2
from shared.types import StepPlan
from shared.wire import description_from_pb, plan_to_pb
from tests.patience import PATIENCE_S
from tests.worker.model_folder import write_model
from tests.worker.planner import Planner, make_runner
from tests.worker.worker_harness import DECODE, FIRST, PROMPT, Stream, Worker, run, until
from worker_svc.serve import SERVICE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), eos_token_id=[3, 9])


def test_describe(model: Path) -> None:
    async def test(worker: Worker) -> None:
        answer = description_from_pb(await worker.stub.Describe(worker_pb2.DescribeRequest()))
        assert answer.fingerprint == load_model_config(model).fingerprint
        assert (answer.dtype, answer.block_size, answer.num_blocks, answer.max_num_seqs) == ("float64", 16, 32, 4)
        assert (answer.vocabulary_size, answer.max_model_length, answer.eos_token_ids) == (300, 512, (3, 9))
        assert (answer.tensor_parallel_size, answer.attention) == (1, "torch")

    run(test, model)


def test_plans_ahead_are_answered_in_order_with_the_models_tokens(model: Path) -> None:
    planner = Planner(make_runner(model))
    planner.admit(0, PROMPT.tolist())
    expected = planner.generate(0, 12)

    async def test(worker: Worker) -> None:
        stream = Stream(worker)
        await stream.send(**{name: getattr(FIRST, name) for name in ("admitted", "grown", "rows", "token_ids")})
        for _ in range(3):
            await stream.send(rows=DECODE)
        tokens = []
        for step_id in range(1, 13):
            result = await stream.read()
            assert (result.epoch, result.step_id) == (1, step_id)
            tokens += result.token_ids.tolist()
            if stream.step_id < 12:
                await stream.send(rows=DECODE)
        assert tokens == expected

    run(test, model)


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        (StepPlan(1, 3), "step_id: 3 where 2 is next"),
        (StepPlan(1, 1), "step_id"),
        (StepPlan(2, 2), "epoch"),
        (StepPlan(1, 2, rows=np.array([[3, 1, 0]], dtype=np.int32)), "slot 3"),
        (StepPlan(1, 2, zeroed=np.array([32], dtype=np.int32)), "zeroed"),
    ],
    ids=["gap", "again", "other epoch", "free slot", "block out of range"],
)
def test_a_plan_that_does_not_follow_ends_the_stream_not_the_worker(model: Path, plan: StepPlan, named: str) -> None:
    async def test(worker: Worker) -> None:
        stream = Stream(worker)
        await stream.send()
        await stream.read()
        await stream.call.write(plan_to_pb(plan, 7))
        code, details = await stream.ended()
        assert code is StatusCode.INVALID_ARGUMENT
        assert named in details
        again = Stream(worker, epoch=2)
        await again.send()
        assert (await again.read()).step_id == 1

    run(test, model)


def test_a_message_that_is_no_plan(model: Path) -> None:
    async def test(worker: Worker) -> None:
        stream = Stream(worker)
        await stream.call.write(worker_pb2.StepPlan(instance=7, epoch=1, step_id=1, rows=b"12345"))
        assert (await stream.ended())[0] is StatusCode.INVALID_ARGUMENT
        raw = worker.channel.stream_stream(f"/{SERVICE}/Execute", request_serializer=bytes)()
        await raw.write(b"\xff\xff\xff")
        with pytest.raises(aio.AioRpcError, match="can't be read"):
            await raw.read()
        assert await raw.code() is StatusCode.INVALID_ARGUMENT
        again = Stream(worker, epoch=2)
        await again.send()
        assert (await again.read()).step_id == 1

    run(test, model)


def test_a_failed_step_ends_the_epoch_with_its_message() -> None:
    async def test(worker: Worker) -> None:
        worker.group.error = RuntimeError("out of memory")
        stream = Stream(worker)
        await stream.send()
        await stream.send()
        code, details = await stream.ended()
        assert code is StatusCode.INTERNAL
        assert "step 1" in details and "out of memory" in details
        assert worker.group.commands == ["open", (1, 1)]
        worker.group.error = None
        again = Stream(worker, epoch=2)
        await again.send()
        await again.read()

    run(test)


def test_a_plan_that_is_refused_while_others_run() -> None:
    """Those before it are answered, those behind it never begin, and the next epoch opens."""

    async def test(worker: Worker) -> None:
        worker.group.results.clear()
        stream = Stream(worker)
        for _ in range(2):
            await stream.send()
        await until(lambda: (1, 2) in worker.group.commands)
        worker.group.error = InvalidRequest("rows", "slot 3 holds no sequence")
        for _ in range(3):
            await stream.send()
        await until(lambda: (1, 3) in worker.group.commands)
        worker.group.results.set()
        assert [(await stream.read()).step_id for _ in range(2)] == [1, 2]
        code, details = await stream.ended()
        assert code is StatusCode.INVALID_ARGUMENT and "slot 3" in details
        worker.group.error = None
        again = Stream(worker, epoch=2)
        await again.send()
        assert (await again.read()).epoch == 2
        assert worker.group.commands == ["open", (1, 1), (1, 2), (1, 3), "open", (2, 1)]

    run(test)


def test_a_group_that_opens_no_epoch_any_more_ends_its_process() -> None:
    """As on a GPU after an illegal access, where all that follows fails: a worker that stays takes requests to fail."""

    async def test(worker: Worker) -> None:
        ending = asyncio.create_task(worker.server.until_stopped(asyncio.Event()))
        stream = Stream(worker)
        await stream.send()
        await stream.read()
        worker.group.broken = True
        for epoch in (2, 3):
            again = Stream(worker, epoch=epoch)
            await again.send()
            code, details = await again.ended()
            assert code is StatusCode.INTERNAL and "an illegal address" in details
        with pytest.raises(RuntimeError, match="an illegal address"):
            await asyncio.wait_for(ending, PATIENCE_S)

    run(test)


def test_a_step_begins_while_those_before_it_run() -> None:
    """As on a GPU, where a plan's results are ready long after it was launched; silence meanwhile ends nothing."""

    async def test(worker: Worker) -> None:
        worker.group.results.clear()
        stream = Stream(worker)
        for _ in range(3):
            await stream.send()
        await until(lambda: worker.group.commands == ["open", (1, 1), (1, 2), (1, 3)])
        await asyncio.sleep(1.5)
        worker.group.results.set()
        assert [(await stream.read()).step_id for _ in range(3)] == [1, 2, 3]

    run(test, lease_timeout=1.0)


def test_many_plans_ahead_and_a_closed_side() -> None:
    """More than the protocol's depth are taken as results leave; the stream ends after the last of them."""

    async def test(worker: Worker) -> None:
        worker.group.gate.clear()
        stream = Stream(worker)
        for _ in range(30):
            await stream.send()
        await stream.call.done_writing()
        worker.group.gate.set()
        assert [(await stream.read()).step_id for _ in range(30)] == list(range(1, 31))
        assert (await stream.ended())[0] is StatusCode.OK

    run(test)


def test_a_result_that_fails_comes_after_those_before_it() -> None:
    """As on a GPU, where a step's error shows when its tokens are read; steps behind it are not answered."""

    async def test(worker: Worker) -> None:
        worker.group.failing = 3
        worker.group.results.clear()
        stream = Stream(worker)
        for _ in range(4):
            await stream.send()
        await until(lambda: (1, 4) in worker.group.commands)
        worker.group.results.set()
        assert [(await stream.read()).step_id for _ in range(2)] == [1, 2]
        code, details = await stream.ended()
        assert code is StatusCode.INTERNAL and "step 3" in details

    run(test)
