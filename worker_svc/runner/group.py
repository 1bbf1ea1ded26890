"""Runs one plan stream on all ranks of a group: rank 0 passes every command on, the others follow.

All ranks run the same commands in the same order, so that their batch states can't differ. A plan that is refused is
refused by all of them; any other error of one rank leaves the others in a collective, and the launcher ends them.
"""

import time
from collections import deque
from collections.abc import Callable

import structlog

from shared.errors import InvalidRequest
from shared.pb import worker_pb2
from shared.types import DEPTH_LIMIT, StepPlan, StepResult
from shared.wire import plan_from_pb
from worker_svc.parallel import TensorParallel
from worker_svc.progress import Progress
from worker_svc.runner.runner import PendingTokens, PlanRunner, Runner

_log = structlog.get_logger(__name__)

_OPEN, _STEP, _QUIT = b"O", b"S", b"Q"


class GroupRunner:
    """Rank 0's runner with the other ranks behind it. See step_threads.Group."""

    def __init__(self, runner: Runner, group: TensorParallel, progress: Progress) -> None:
        self.runner = runner
        self._group = group
        self._progress = progress
        self._last_end = 0.0

    def open_epoch(self) -> None:
        """Drops all batch state, on every rank, once the step that is running there has ended."""
        with self._progress.step():
            self._group.send_bytes(_OPEN)
            self.runner.open_epoch()

    def step(self, message: worker_pb2.StepPlan) -> Callable[[], StepResult]:
        """Begins a step; what it gives waits for the result: call it exactly once, in the order of the steps.

        Raises InvalidRequest for what is no plan, or does not follow; then a new epoch must be opened.
        """
        started = time.perf_counter()
        plan = parse_plan(message)
        self._progress.begin()
        try:
            if self._group.size > 1:
                self._group.send_bytes(_STEP + message.SerializeToString())
            tokens = self.runner.step(plan)
        except BaseException:
            self._progress.end()
            raise
        return lambda: self._finish(plan, started, tokens)

    def _finish(self, plan: StepPlan, started: float, tokens: PendingTokens) -> StepResult:
        """The step's time counts from the end of the one before, where it was begun ahead of that."""
        try:
            given = tokens.to_host()
        finally:
            self._progress.end()
        ended = time.perf_counter()
        elapsed, self._last_end = ended - max(started, self._last_end), ended
        return StepResult(
            epoch=plan.epoch,
            step_id=plan.step_id,
            token_ids=given.token_ids,
            failed_rows=given.failed_rows,
            step_time_us=int(elapsed * 1e6),
            logprobs=given.logprobs,
            prompt_logprobs=given.prompt_logprobs,
        )

    def close(self) -> None:
        """Ends the other ranks and the connections to them."""
        self._group.send_bytes(_QUIT)
        self._group.leave()


def follow(runner: PlanRunner, group: TensorParallel, progress: Progress) -> None:
    """Runs what rank 0 passes on until it says to end. Raises RankLost where it ends without a word."""
    pending: deque[PendingTokens] = deque()
    while (command := group.receive_bytes()) != _QUIT:
        with progress.step():
            if command == _OPEN:
                runner.open_epoch()
            else:
                _follow_step(runner, command[len(_STEP) :], pending)
    group.leave()


def _follow_step(runner: PlanRunner, data: bytes, pending: deque[PendingTokens]) -> None:
    """Begins a step; waits for an older one where as many are running as rank 0 may have."""
    try:
        pending.append(runner.step(parse_plan(worker_pb2.StepPlan.FromString(data))))
    except InvalidRequest as error:
        _log.warning("refused a plan, as rank 0 did", problem=str(error))
    if len(pending) >= DEPTH_LIMIT:
        pending.popleft().to_host()


def parse_plan(message: worker_pb2.StepPlan) -> StepPlan:
    """Raises InvalidRequest where the message is not a plan."""
    try:
        return plan_from_pb(message)
    except ValueError as error:
        raise InvalidRequest("plan", str(error)) from None
