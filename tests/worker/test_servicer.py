"""WorkerService over real gRPC in one process: the plan log, the lease, failures, health, draining.

A real tiny model where tokens matter; a group whose steps wait for the test where the order of events does.
"""

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from shared.model_config import load_model_config
from shared.pb import worker_pb2, worker_pb2_grpc
from shared.rpc import make_channel
from shared.types import Admission, RowSampling, StepPlan, StepResult, WorkerDescription
from shared.wire import description_from_pb, plan_to_pb, result_from_pb
from tests.worker.model_folder import write_model
from tests.worker.planner import Planner, make_runner
from worker_svc.config import WorkerConfig
from worker_svc.progress import Progress
from worker_svc.serve import SERVICE, WorkerServer

DESCRIPTION = WorkerDescription("f", "m", "float64", 16, 8, 64, 300, (1,), 1, 4, 64, "0", "torch")
PROMPT = np.arange(5, dtype=np.int32)
FIRST = StepPlan(
    1,
    1,
    admitted=(Admission(0, 5, 0, 5, np.empty(0, dtype=np.int32), RowSampling(temperature=0.0)),),
    grown=np.array([[0, 0]], dtype=np.int32),
    rows=np.array([[0, 5, 5]], dtype=np.int32),
    token_ids=PROMPT,
)
DECODE = np.array([[0, 1, 0]], dtype=np.int32)


class ScriptedGroup:
    """Records its commands; steps wait while `gate` is closed and raise `error` where one is set."""

    def __init__(self, progress: Progress) -> None:
        self.commands: list[Any] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self._progress = progress

    def open_epoch(self) -> None:
        self.commands.append("open")

    def step(self, message: worker_pb2.StepPlan) -> StepResult:
        self.commands.append((message.epoch, message.step_id))
        with self._progress.step():
            assert self.gate.wait(20)
        if self.error is not None:
            raise self.error
        return StepResult(message.epoch, message.step_id)

    def close(self) -> None:
        self.commands.append("close")


@dataclasses.dataclass
class Worker:
    """A server and a client of it."""

    server: WorkerServer
    channel: aio.Channel
    group: ScriptedGroup

    @property
    def stub(self) -> Any:
        return worker_pb2_grpc.WorkerServiceStub(self.channel)

    async def health(self, service: str) -> str:
        stub = health_pb2_grpc.HealthStub(self.channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


class Stream:
    """A plan stream written and read by hand."""

    def __init__(self, worker: Worker, instance: int = 7, epoch: int = 1) -> None:
        self.instance, self.epoch, self.step_id = instance, epoch, 0
        self.call = worker.stub.Execute()

    async def send(self, **changes: Any) -> None:
        self.step_id += 1
        plan = dataclasses.replace(StepPlan(self.epoch, self.step_id), **changes)
        await self.call.write(plan_to_pb(plan, self.instance))

    async def read(self) -> StepResult:
        message = await asyncio.wait_for(self.call.read(), 10)
        assert message is not aio.EOF, f"ended: {await self.call.code()} {await self.call.details()}"
        assert message.instance == self.instance
        return result_from_pb(message)

    async def ended(self) -> tuple[StatusCode, str]:
        """The status, once what came before it was read."""
        with contextlib.suppress(aio.AioRpcError):
            while await asyncio.wait_for(self.call.read(), 10) is not aio.EOF:
                pass
        return await self.call.code(), await self.call.details()


@contextlib.asynccontextmanager
async def worker(model: Path | None = None, **settings: Any) -> AsyncIterator[Worker]:
    """A listening worker; with the scripted group unless a model is given."""
    values = {"port": 0, "dtype": "float64", "block_size": 16, "num_kv_blocks": 32, "max_num_seqs": 4, **settings}
    config = WorkerConfig(str(model), **values)
    progress = Progress(np.zeros((1, 2)), 0)
    server = WorkerServer(config, progress)
    port = await server.start()
    watch = asyncio.create_task(server.watch())
    group = ScriptedGroup(progress)
    if model is None:
        await server.answer(group, DESCRIPTION)
    else:
        await server.load(Path("/nowhere"))
    channel = make_channel(f"127.0.0.1:{port}")
    try:
        yield Worker(server, channel, group)
    finally:
        group.gate.set()
        await channel.close()
        await server.stop()
        watch.cancel()


def run(test: Callable[[Worker], Awaitable[None]], model: Path | None = None, **settings: Any) -> None:
    async def main() -> None:
        async with worker(model, **settings) as running:
            await asyncio.wait_for(test(running), 30)

    asyncio.run(main())


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


def test_another_instance_is_refused_while_the_stream_is_open() -> None:
    async def test(worker: Worker) -> None:
        holder = Stream(worker, instance=7, epoch=3)
        await holder.send()
        await holder.read()
        other = Stream(worker, instance=8, epoch=9)
        await other.send()
        assert (await other.ended())[0] is StatusCode.FAILED_PRECONDITION
        await holder.send()
        assert (await holder.read()).step_id == 2
        await holder.call.done_writing()
        assert (await holder.ended())[0] is StatusCode.OK
        other = Stream(worker, instance=8, epoch=1)
        await other.send()
        assert (await other.read()).epoch == 1

    run(test)


@pytest.mark.parametrize("epoch", [2, 3])
def test_an_epoch_does_not_come_back(epoch: int) -> None:
    async def test(worker: Worker) -> None:
        stream = Stream(worker, epoch=3)
        await stream.send()
        await stream.read()
        for _ in range(2):  # while it is open, and after it
            late = Stream(worker, epoch=epoch)
            await late.send()
            assert (await late.ended())[0] is StatusCode.FAILED_PRECONDITION
            stream.call.cancel()

    run(test)


def test_a_higher_epoch_takes_over_after_the_running_step_and_drops_what_was_queued() -> None:
    async def test(worker: Worker) -> None:
        worker.group.gate.clear()
        old = Stream(worker, epoch=1)
        for _ in range(3):
            await old.send()
        await until(lambda: (1, 1) in worker.group.commands)
        new = Stream(worker, epoch=2)
        await new.send()
        await asyncio.sleep(0.2)
        assert worker.group.commands == ["open", (1, 1)], "opened while a step was running"
        worker.group.gate.set()
        assert (await new.read()).epoch == 2
        assert (await old.ended())[0] is StatusCode.FAILED_PRECONDITION
        assert worker.group.commands == ["open", (1, 1), "open", (2, 1)]

    run(test)


def test_a_lost_scheduler_frees_the_lease_while_its_step_runs() -> None:
    async def test(worker: Worker) -> None:
        worker.group.gate.clear()
        lost = Stream(worker, instance=7)
        for _ in range(3):
            await lost.send()
        await until(lambda: (1, 1) in worker.group.commands)
        lost.call.cancel()
        await asyncio.wait_for(worker.server.released(), 5)
        other = Stream(worker, instance=8)
        await other.send()
        worker.group.gate.set()
        await other.read()
        assert worker.group.commands == ["open", (1, 1), "open", (1, 1)]

    run(test)


def test_silence_ends_the_lease_but_a_long_step_is_not_silence() -> None:
    async def test(worker: Worker) -> None:
        stream = Stream(worker, instance=7)
        worker.group.gate.clear()
        await stream.send()
        await asyncio.sleep(0.8)
        worker.group.gate.set()
        assert (await stream.read()).step_id == 1
        code, details = await stream.ended()
        assert code is StatusCode.DEADLINE_EXCEEDED
        assert "no plan for 0.4 s" in details
        other = Stream(worker, instance=8)
        await other.send()
        await other.read()

    run(test, lease_timeout=0.4)


def test_heartbeats_are_answered_and_keep_the_lease() -> None:
    async def test(worker: Worker) -> None:
        stream = Stream(worker)
        for step_id in range(1, 8):
            await stream.send()
            assert (await stream.read()).step_id == step_id
            await asyncio.sleep(0.15)

    run(test, lease_timeout=0.6)


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


def test_draining() -> None:
    """Results say so, nobody else may open a stream, health tells; the open stream goes on until it is closed."""

    async def test(worker: Worker) -> None:
        stream = Stream(worker)
        await stream.send()
        assert not (await stream.read()).draining
        drained = asyncio.create_task(worker.server.drain())
        await until_async(lambda: worker.health("readiness"), "NOT_SERVING")
        assert await worker.health(SERVICE) == "NOT_SERVING"
        assert await worker.health("liveness") == "SERVING"
        for _ in range(2):
            await stream.send()
            assert (await stream.read()).draining
        late = Stream(worker, epoch=2)
        await late.send()
        assert (await late.ended())[0] is StatusCode.UNAVAILABLE
        assert not drained.done()
        await stream.call.done_writing()
        await asyncio.wait_for(drained, 5)

    run(test)


def test_draining_ends_with_the_grace_period() -> None:
    async def test(worker: Worker) -> None:
        stream = Stream(worker)
        await stream.send()
        await stream.read()
        await asyncio.wait_for(worker.server.drain(), 5)

    run(test, drain_timeout=0.3)


def test_calls_are_answered_during_a_step_and_a_stuck_one_is_told() -> None:
    async def test(worker: Worker) -> None:
        assert await worker.health("readiness") == "SERVING"
        worker.group.gate.clear()
        stream = Stream(worker)
        await stream.send()
        await until_async(lambda: worker.health("readiness"), "NOT_SERVING")
        assert await worker.health("liveness") == "SERVING"
        await worker.stub.Describe(worker_pb2.DescribeRequest(), timeout=5)
        worker.group.gate.set()
        await stream.read()
        await until_async(lambda: worker.health("readiness"), "SERVING")

    run(test, step_timeout=0.3)


def test_nothing_is_served_before_the_group_is_warm() -> None:
    async def test() -> None:
        server = WorkerServer(WorkerConfig("unused", port=0), Progress(np.zeros((1, 2)), 0))
        channel = make_channel(f"127.0.0.1:{await server.start()}")
        running = Worker(server, channel, ScriptedGroup(Progress(np.zeros((1, 2)), 0)))
        assert await running.health("readiness") == await running.health("") == "NOT_SERVING"
        assert await running.health("liveness") == "SERVING"
        describe = asyncio.ensure_future(running.stub.Describe(worker_pb2.DescribeRequest()))
        await asyncio.sleep(0.1)
        assert not describe.done()
        await server.answer(running.group, DESCRIPTION)
        assert description_from_pb(await describe) == DESCRIPTION
        assert await running.health(SERVICE) == "SERVING"
        await channel.close()
        await server.stop()

    asyncio.run(test())


def test_reflection_tells_the_services() -> None:
    async def test(worker: Worker) -> None:
        stub = reflection_pb2_grpc.ServerReflectionStub(worker.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= names

    run(test)


async def until(condition: Callable[[], bool]) -> None:
    """Polls; the caller's own timeout ends it."""
    while not condition():
        await asyncio.sleep(0.01)


async def until_async(value: Callable[[], Awaitable[str]], wanted: str) -> None:
    """Polls; the caller's own timeout ends it."""
    while await value() != wanted:
        await asyncio.sleep(0.02)
