"""One worker link against a worker that is slow on purpose: heartbeats, depth, and what the log says."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog
from grpc import aio

from scheduler_svc.worker_client import WorkerLink
from shared.dialer import Dialer
from shared.pb import worker_pb2, worker_pb2_grpc
from shared.security import PLAIN
from shared.types import StepPlan, StepResult, WorkerDescription
from tests.patience import PATIENCE_S


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """Answers each plan after a delay; ends its stream after `most` results."""

    def __init__(self, delays: dict[int, float], most: int) -> None:
        self._delays = delays
        self._most = most

    async def Describe(self, request, context):
        return worker_pb2.DescribeResponse()

    async def Execute(self, plans, context):
        async for plan in plans:
            await asyncio.sleep(self._delays.get(plan.step_id, 0.0))
            yield worker_pb2.StepResult(instance=plan.instance, epoch=plan.epoch, step_id=plan.step_id)
            if plan.step_id == self._most:
                return


class Listener:
    """Counts; its plans have no rows."""

    def __init__(self) -> None:
        self.epoch = self.step_id = self.results = self.losses = 0

    def described(self, group: int, description: WorkerDescription) -> None:
        pass

    def opened(self, group: int, description: WorkerDescription) -> StepPlan:
        self.epoch += 1
        self.step_id = 0
        return self.heartbeat(group)

    def connected(self, group: int) -> None:
        pass

    def heartbeat(self, group: int) -> StepPlan:
        self.step_id += 1
        return StepPlan(self.epoch, self.step_id)

    def result(self, group: int, result: StepResult) -> None:
        self.results += 1

    def lost(self, group: int) -> None:
        self.losses += 1


@contextlib.asynccontextmanager
async def linked(worker: Worker) -> AsyncIterator[tuple[WorkerLink, Listener]]:
    server = aio.server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    listener = Listener()
    link = WorkerLink(0, f"127.0.0.1:{port}", listener, Dialer(PLAIN), instance=1, step_timeout=10.0)
    running = asyncio.create_task(link.run())
    try:
        yield link, listener
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(0)


def test_a_long_step_gathers_no_heartbeats() -> None:
    async def scenario() -> None:
        async with linked(Worker({2: 2.0}, 100)) as (link, listener):
            while listener.step_id < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(1.5)
            assert len(link.outstanding) == 1, "only the one that runs"
            while listener.results < 3:
                await asyncio.sleep(0.01)
            assert listener.losses == 0

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_the_first_round_trip_counts_whole_but_not_the_opening() -> None:
    """Under constant load no other plan is ever sent alone: a tenth of it would be believed for ever."""

    async def scenario() -> None:
        async with linked(Worker({1: 1.0, 2: 0.2}, 100)) as (link, listener):
            while listener.results < 2:
                await asyncio.sleep(0.01)
            link._step_s = 0.1
            assert link.depth == 4, link._round_trip_s
            assert link._round_trip_s < 0.5

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_each_loss_is_logged_though_the_reason_is_the_same() -> None:
    async def scenario() -> None:
        async with linked(Worker({}, 1)) as (_, listener):
            while listener.losses < 3:
                await asyncio.sleep(0.01)

    with structlog.testing.capture_logs() as logs:
        asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert [entry["event"] for entry in logs[:4]] == ["worker connected", "no worker"] * 2


def test_an_address_of_no_worker_is_told_as_such() -> None:
    """Such as another node's of a group, of which node 0 alone serves."""
    with structlog.testing.capture_logs() as logs:

        async def scenario() -> None:
            server = aio.server()
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            link = WorkerLink(0, f"127.0.0.1:{port}", Listener(), Dialer(PLAIN), instance=1, step_timeout=10.0)
            running = asyncio.create_task(link.run())
            while not logs:
                await asyncio.sleep(0.01)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await server.stop(0)

        asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert "node 0 alone" in logs[0]["reason"]
