"""The two threads that execute plans: one begins steps in the order of their plans, the other waits for their results.

So a step begins while those before it run, and a result goes out while the next plan comes in. Knows the streams that
plans come from, not how they came.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeAlias

import structlog

from shared.errors import RequestFailed, TandemError
from shared.pb import worker_pb2
from shared.types import StepResult
from shared.wire import result_to_pb
from worker_svc.stats import StepStats

_log = structlog.get_logger(__name__)


class Group(Protocol):
    """All ranks of a group as one; called from one thread, but for what `step` gives."""

    def open_epoch(self) -> None:
        """Drops all batch state once the running step has ended. A group that can't will never be able to."""

    def step(self, message: worker_pb2.StepPlan) -> Callable[[], StepResult]:
        """Begins a step; what it gives waits for the result. Raises InvalidRequest for a plan that does not follow."""

    def close(self) -> None:
        """Ends the other ranks."""


class Source(Protocol):
    """One epoch's stream of plans."""

    opened: bool
    """Whether its epoch is open."""
    ended: bool
    """Its plans that have not begun are dropped."""

    def answer(self, answer: worker_pb2.StepResult) -> None:
        """The next plan's result. From a thread."""

    def end(self, error: Exception) -> None:
        """Why there will be no more results. From a thread."""


_Plan: TypeAlias = tuple[Source, worker_pb2.StepPlan]
_Begun: TypeAlias = tuple[Source, worker_pb2.StepPlan, Callable[[], StepResult]]


class StepThreads:
    """Runs until closed."""

    def __init__(self, group: Group, stats: StepStats) -> None:
        self.broken: Future[None] = Future()
        """Never done, but for the error with which the group opens no epoch any more."""
        self._group = group
        self._stats = stats
        self._plans: queue.SimpleQueue[_Plan | None] = queue.SimpleQueue()
        self._begun: queue.SimpleQueue[_Begun | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._begin_steps, self._finish_steps)]
        for thread in self._threads:
            thread.start()

    def put(self, source: Source, plan: worker_pb2.StepPlan) -> None:
        """The first plan of a source opens its epoch."""
        self._plans.put((source, plan))

    def close(self) -> None:
        """Waits for what has begun, then ends the other ranks."""
        self._plans.put(None)
        for thread in self._threads:
            thread.join()
        self._group.close()

    def _begin_steps(self) -> None:
        while (item := self._plans.get()) is not None:
            source, plan = item
            if not source.ended:
                self._begun.put((source, plan, self._begin(source, plan)))
        self._begun.put(None)

    def _begin(self, source: Source, plan: worker_pb2.StepPlan) -> Callable[[], StepResult]:
        """Whoever waits for the step is told of an error in its turn: after the results of the steps before it."""
        try:
            if not source.opened:
                self._open(source, plan)
            return self._group.step(plan)
        except Exception as error:
            source.ended = True
            return _raising(error)

    def _open(self, source: Source, plan: worker_pb2.StepPlan) -> None:
        try:
            self._group.open_epoch()
        except Exception as error:
            if not self.broken.done():
                self.broken.set_exception(error)
            raise
        source.opened = True
        self._stats.opened()
        _log.info("epoch opened", instance=f"{plan.instance:016x}", epoch=plan.epoch)

    def _finish_steps(self) -> None:
        while (item := self._begun.get()) is not None:
            source, plan, wait = item
            try:
                result = result_to_pb(wait(), plan.instance)
                source.answer(result)
                self._stats.step(plan, result)
            except TandemError as error:
                source.end(error)
            except Exception as error:
                _log.error("step failed", epoch=plan.epoch, step=plan.step_id, exc_info=error)
                source.end(RequestFailed(f"step {plan.step_id} failed: {error!r}"))


def _raising(error: Exception) -> Callable[[], StepResult]:
    def wait() -> StepResult:
        raise error

    return wait
