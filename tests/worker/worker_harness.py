"""A worker's gRPC server and a client of it in one process.

With a real tiny model where tokens matter, and a group whose steps wait for the test where the order of events does.
"""

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.pb import worker_pb2, worker_pb2_grpc
from shared.rpc import make_channel
from shared.types import Admission, RowSampling, StepPlan, StepResult, WorkerDescription
from shared.wire import plan_to_pb, result_from_pb
from tests.patience import PATIENCE_S
from worker_svc.config import WorkerConfig
from worker_svc.progress import Progress
from worker_svc.serve import WorkerServer
from worker_svc.stats import no_stats

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
    """Records its commands; steps wait while `gate` is closed and raise `error` where one is set, results wait while
    `results` is closed, and that of step `failing` raises. No epoch opens once it is `broken`."""

    def __init__(self, progress: Progress) -> None:
        self.commands: list[Any] = []
        self.gate = threading.Event()
        self.gate.set()
        self.results = threading.Event()
        self.results.set()
        self.error: Exception | None = None
        self.failing = 0
        self.broken = False
        self._progress = progress

    def open_epoch(self) -> None:
        self.commands.append("open")
        if self.broken:
            raise RuntimeError("an illegal address")

    def step(self, message: worker_pb2.StepPlan) -> Callable[[], StepResult]:
        self.commands.append((message.epoch, message.step_id))
        with self._progress.step():
            assert self.gate.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return lambda: self._finish(message)

    def _finish(self, message: worker_pb2.StepPlan) -> StepResult:
        assert self.results.wait(PATIENCE_S)
        if message.step_id == self.failing:
            raise RuntimeError("an illegal address")
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
        message = await asyncio.wait_for(self.call.read(), PATIENCE_S)
        assert message is not aio.EOF, f"ended: {await self.call.code()} {await self.call.details()}"
        assert message.instance == self.instance
        return result_from_pb(message)

    async def ended(self) -> tuple[StatusCode, str]:
        """The status, once what came before it was read."""
        with contextlib.suppress(aio.AioRpcError):
            while await asyncio.wait_for(self.call.read(), PATIENCE_S) is not aio.EOF:
                pass
        return await self.call.code(), await self.call.details()


@contextlib.asynccontextmanager
async def worker(model: Path | None = None, **settings: Any) -> AsyncIterator[Worker]:
    """A listening worker; with the scripted group unless a model is given."""
    values = {"port": 0, "dtype": "float64", "block_size": 16, "num_kv_blocks": 32, "max_num_seqs": 4, **settings}
    config = WorkerConfig(str(model), **values)
    progress = Progress(np.zeros((1, 3)), 0)
    server = WorkerServer(config, progress, no_stats())
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
        group.results.set()
        await channel.close()
        await server.stop()
        watch.cancel()


def run(test: Callable[[Worker], Awaitable[None]], model: Path | None = None, **settings: Any) -> None:
    async def main() -> None:
        async with worker(model, **settings) as running:
            await asyncio.wait_for(test(running), PATIENCE_S)

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    """Polls; the caller's own timeout ends it."""
    while not condition():
        await asyncio.sleep(0.01)


async def until_async(value: Callable[[], Awaitable[str]], wanted: str) -> None:
    """Polls; the caller's own timeout ends it."""
    while await value() != wanted:
        await asyncio.sleep(0.02)
