"""WorkerService over gRPC: describes the group, executes plan streams. Steps run off the event loop, in one thread."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from typing import Any, Protocol, TypeVar

import structlog

from shared.errors import LeaseHeld, RequestFailed, TandemError, Unavailable
from shared.pb import worker_pb2, worker_pb2_grpc
from shared.types import StepResult, WorkerDescription
from shared.wire import description_to_pb, result_to_pb
from worker_svc.plan_stream import Lease, PlanStream

_log = structlog.get_logger(__name__)

T = TypeVar("T")


class Group(Protocol):
    """All ranks of a group as one; called from one thread."""

    def open_epoch(self) -> None:
        """Drops all batch state once the running step has ended."""

    def step(self, message: worker_pb2.StepPlan) -> StepResult:
        """Raises InvalidRequest for a plan that does not follow."""

    def close(self) -> None:
        """Ends the other ranks."""


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Calls wait until `serve` has given it a warm group."""

    def __init__(self, thread: Executor, lease_timeout_s: float) -> None:
        """`thread` has one thread: commands run in the order in which they were given."""
        self._thread = thread
        self._lease_timeout_s = lease_timeout_s
        self._warm: asyncio.Future[tuple[Group, WorkerDescription]] = asyncio.Future()
        self.lease = Lease()
        self.draining = False
        """Results say so, and no new stream may open."""

    def serve(self, group: Group, description: WorkerDescription) -> None:
        """From now on calls are answered."""
        self._warm.set_result((group, description))

    async def Describe(self, request: worker_pb2.DescribeRequest, context: Any) -> worker_pb2.DescribeResponse:
        """Answers once the group is warm."""
        _, description = await asyncio.shield(self._warm)
        return description_to_pb(description)

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.StepPlan], context: Any
    ) -> AsyncIterator[worker_pb2.StepResult]:
        """One epoch: from its first plan to the end of the stream, an error, or silence."""
        group, _ = await asyncio.shield(self._warm)
        stream = PlanStream(self._lease_timeout_s)
        reader = asyncio.create_task(stream.fill(request_iterator))
        try:
            plan = await stream.next()
            if plan is None:
                return
            await self._open_epoch(group, stream, plan)
            while plan is not None:
                result = await self._step(group, plan)
                yield result_to_pb(result, plan.instance)
                plan = await stream.next()
        except (LeaseHeld, Unavailable):
            raise  # a scheduler that waits for its turn asks several times a second, and logs why by itself
        except TandemError as error:
            _log.warning("plan stream ended", problem=str(error))
            raise
        finally:
            reader.cancel()
            self.lease.release(stream)

    async def _open_epoch(self, group: Group, stream: PlanStream, first: worker_pb2.StepPlan) -> None:
        if self.draining:
            raise Unavailable("the worker is shutting down")
        self.lease.take(stream, first.instance, first.epoch)
        await self._run(group.open_epoch)
        _log.info("epoch opened", instance=f"{first.instance:016x}", epoch=first.epoch)

    async def _step(self, group: Group, plan: worker_pb2.StepPlan) -> StepResult:
        try:
            result = await self._run(lambda: group.step(plan))
        except TandemError:
            raise
        except Exception as error:
            _log.exception("step failed", epoch=plan.epoch, step=plan.step_id)
            raise RequestFailed(f"step {plan.step_id} failed: {error!r}") from error
        return dataclasses.replace(result, draining=self.draining)

    async def _run(self, command: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, command)
