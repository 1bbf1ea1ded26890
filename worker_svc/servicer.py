"""WorkerService over gRPC: describes the group, executes plan streams.

Off the event loop: one thread begins steps, another waits for their results, so that a step begins while those before
it run.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias, TypeVar

import structlog

from shared.errors import DeadlineExceeded, LeaseHeld, RequestFailed, TandemError, Unavailable
from shared.pb import worker_pb2, worker_pb2_grpc
from shared.types import DEPTH_LIMIT, StepResult, WorkerDescription
from shared.wire import description_to_pb, result_to_pb
from worker_svc.plan_stream import Lease, PlanStream

_log = structlog.get_logger(__name__)

T = TypeVar("T")


class Group(Protocol):
    """All ranks of a group as one; called from one thread, but for what `step` gives."""

    def open_epoch(self) -> None:
        """Drops all batch state once the running step has ended."""

    def step(self, message: worker_pb2.StepPlan) -> Callable[[], StepResult]:
        """Begins a step; what it gives waits for the result. Raises InvalidRequest for a plan that does not follow."""

    def close(self) -> None:
        """Ends the other ranks."""


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Calls wait until `serve` has given it a warm group."""

    def __init__(self, thread: Executor, lease_timeout_s: float) -> None:
        """`thread` has one thread: commands run in the order in which they were given."""
        self._thread = thread
        self._results = ThreadPoolExecutor(1, "results")
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
        steps = _Steps(stream)
        tasks = [
            asyncio.create_task(stream.fill(request_iterator)),
            asyncio.create_task(steps.fill(self._begin_steps(group, steps))),
        ]
        try:
            async for plan, result in steps.results():
                result = dataclasses.replace(result, draining=self.draining)
                yield result_to_pb(result, plan.instance)
        except (LeaseHeld, Unavailable):
            raise  # a scheduler that waits for its turn asks several times a second, and logs why by itself
        except TandemError as error:
            _log.warning("plan stream ended", problem=str(error))
            raise
        finally:
            for task in tasks:
                task.cancel()
            self.lease.release(stream)

    async def _begin_steps(self, group: Group, steps: "_Steps") -> AsyncIterator["_Step"]:
        """Begins each plan's step as it comes, whether or not those before it have ended."""
        plan = await steps.next_plan()
        if plan is not None:
            await self._open_epoch(group, steps.stream, plan)
        while plan is not None:
            yield plan, await self._begin(group, plan)
            plan = await steps.next_plan()

    async def _open_epoch(self, group: Group, stream: PlanStream, first: worker_pb2.StepPlan) -> None:
        if self.draining:
            raise Unavailable("the worker is shutting down")
        self.lease.take(stream, first.instance, first.epoch)
        await self._run(group.open_epoch)
        _log.info("epoch opened", instance=f"{first.instance:016x}", epoch=first.epoch)

    async def _begin(self, group: Group, plan: worker_pb2.StepPlan) -> "Future[StepResult]":
        """The thread that began the step sees to it that someone waits for it, even if the stream is gone by then."""
        try:
            return await self._run(lambda: self._results.submit(group.step(plan)))
        except TandemError:
            raise
        except Exception as error:
            raise _failed(plan, error) from error

    async def _run(self, command: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, command)


_Step: TypeAlias = tuple[worker_pb2.StepPlan, "Future[StepResult]"]


class _Steps:
    """The steps of one stream that have begun, and whose results were not sent."""

    def __init__(self, stream: PlanStream) -> None:
        self.stream = stream
        self._begun: asyncio.Queue[_Step | Exception | None] = asyncio.Queue(DEPTH_LIMIT)
        self._running = 0

    async def next_plan(self) -> worker_pb2.StepPlan | None:
        """As PlanStream.next; while a step runs the scheduler may be silent."""
        while True:
            try:
                return await self.stream.next()
            except DeadlineExceeded:
                if not self._running:
                    raise

    async def fill(self, steps: AsyncIterator[_Step]) -> None:
        """Takes steps as they begin, to the end or an error."""
        try:
            async for step in steps:
                self._running += 1
                await self._begun.put(step)
            await self._begun.put(None)
        except Exception as error:
            await self._begun.put(error)

    async def results(self) -> AsyncIterator[tuple[worker_pb2.StepPlan, StepResult]]:
        """In the order of the plans. Raises what ended the stream, after the results before it."""
        while (step := await self._begun.get()) is not None:
            if isinstance(step, Exception):
                raise step
            plan, future = step
            try:
                result = await asyncio.shield(asyncio.wrap_future(future))
            except Exception as error:
                raise _failed(plan, error) from error
            self._running -= 1
            yield plan, result


def _failed(plan: worker_pb2.StepPlan, error: Exception) -> RequestFailed:
    _log.error("step failed", epoch=plan.epoch, step=plan.step_id, exc_info=error)
    return RequestFailed(f"step {plan.step_id} failed: {error!r}")
