"""One scheduler's open stream and the lease that it is: who may send plans, for how long. Knows nothing of steps."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from shared.errors import DeadlineExceeded, InvalidRequest, LeaseHeld
from shared.pb import worker_pb2
from shared.types import DEPTH_LIMIT

_MOST_UNANSWERED = 2 * DEPTH_LIMIT


class PlanStream:
    """What came on one call and what goes back. A step_threads.Source, whose methods any thread may call."""

    def __init__(self, silence_timeout_s: float) -> None:
        self.opened = False
        self.ended = False
        self._loop = asyncio.get_running_loop()
        self._silence_timeout_s = silence_timeout_s
        self._first: worker_pb2.StepPlan | None = None
        self._unanswered = 0
        self._closed = False
        self._answers: asyncio.Queue[worker_pb2.StepResult | Exception | None] = asyncio.Queue()
        self._room = asyncio.Event()
        self._heard = self._loop.time()
        self._timer = self._loop.call_later(silence_timeout_s, self._check_silence)

    async def receive(self, message: worker_pb2.StepPlan) -> None:
        """Counts a plan as unanswered. Waits where many are: the transport holds back what comes after it.

        Raises InvalidRequest for a plan of another epoch than the first.
        """
        first = self._first = self._first or message
        if (message.instance, message.epoch) != (first.instance, first.epoch):
            raise InvalidRequest("epoch", f"{message.epoch} on a stream of epoch {first.epoch}")
        while self._unanswered >= _MOST_UNANSWERED:
            self._room.clear()
            await self._room.wait()
        self._unanswered += 1
        self._heard = self._loop.time()

    def close(self) -> None:
        """The scheduler sends no more: the stream ends with the last answer."""
        self._closed = True
        if not self._unanswered:
            self._answers.put_nowait(None)

    def answer(self, answer: worker_pb2.StepResult) -> None:
        """The next plan's result."""
        self._tell(answer)

    def end(self, error: Exception) -> None:
        """No plan begins any more; `answers` raises the error after the results that are there."""
        self.ended = True
        self._tell(error)

    def release(self) -> None:
        """Nobody reads the answers any more."""
        self.ended = True
        self._timer.cancel()

    async def answers(self) -> AsyncIterator[worker_pb2.StepResult]:
        """To the end. Raises what ended the stream: also DeadlineExceeded after silence while nothing ran."""
        while (answer := await self._answers.get()) is not None:
            if isinstance(answer, Exception):
                raise answer
            self._unanswered -= 1
            self._heard = self._loop.time()
            self._room.set()
            yield answer
            if self._closed and not self._unanswered:
                return

    def _tell(self, answer: worker_pb2.StepResult | Exception) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(self._answers.put_nowait, answer)

    def _check_silence(self) -> None:
        """While a step runs the scheduler may be silent."""
        left = self._heard + self._silence_timeout_s - self._loop.time()
        if self._unanswered:
            left = self._silence_timeout_s
        elif left <= 0:
            self.end(DeadlineExceeded(f"no plan for {self._silence_timeout_s:g} s: the lease has ended"))
            return
        self._timer = self._loop.call_later(left, self._check_silence)


class Lease:
    """At most one stream holds it."""

    def __init__(self) -> None:
        self._holder: PlanStream | None = None
        self._instance = self._epoch = 0
        self._free = asyncio.Event()
        self._free.set()

    def take(self, stream: PlanStream, instance: int, epoch: int) -> None:
        """Ends the stream of an earlier epoch of the same instance. Raises LeaseHeld for anyone else."""
        if self._holder is not None and instance != self._instance:
            raise LeaseHeld("another scheduler instance holds this worker")
        if instance == self._instance and epoch <= self._epoch:
            raise LeaseHeld(f"epoch {epoch} is over: this instance has opened epoch {self._epoch}")
        if self._holder is not None:
            self._holder.end(LeaseHeld(f"epoch {epoch} of the same instance has taken over"))
        self._holder, self._instance, self._epoch = stream, instance, epoch
        self._free.clear()

    def is_held_by(self, stream: PlanStream) -> bool:
        """Whether nobody has taken it from the stream."""
        return self._holder is stream

    def release(self, stream: PlanStream) -> None:
        """Does nothing where the stream does not hold the lease."""
        if self._holder is stream:
            self._holder = None
            self._free.set()

    async def released(self) -> None:
        """Waits until nobody holds it."""
        await self._free.wait()
