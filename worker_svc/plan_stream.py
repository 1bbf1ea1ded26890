"""One scheduler's open stream and the lease that it is: who may send plans, for how long. Knows nothing of steps."""

import asyncio
from collections.abc import AsyncIterator

from shared.errors import DeadlineExceeded, InvalidRequest, LeaseHeld
from shared.pb import worker_pb2
from shared.types import DEPTH_LIMIT


class PlanStream:
    """Plans that arrived on one call and were not taken yet. The transport holds back what is beyond the depth."""

    def __init__(self, silence_timeout_s: float) -> None:
        self._silence_timeout_s = silence_timeout_s
        self._queue: asyncio.Queue[worker_pb2.StepPlan | Exception | None] = asyncio.Queue(DEPTH_LIMIT)
        self._first: worker_pb2.StepPlan | None = None

    async def fill(self, messages: AsyncIterator[worker_pb2.StepPlan]) -> None:
        """Reads until the scheduler closes its side, or sends what is no message."""
        try:
            async for message in messages:
                await self._queue.put(message)
            await self._queue.put(None)
        except Exception as error:
            await self._queue.put(InvalidRequest("plan", f"can't be read: {error!r}"))

    async def next(self) -> worker_pb2.StepPlan | None:
        """The next plan, None at the end. Raises what ended the stream, DeadlineExceeded after silence,
        InvalidRequest for a plan of another epoch than the first."""
        try:
            async with asyncio.timeout(self._silence_timeout_s):
                item = await self._queue.get()
        except TimeoutError:
            raise DeadlineExceeded(f"no plan for {self._silence_timeout_s:g} s: the lease has ended") from None
        if isinstance(item, Exception):
            raise item
        if item is not None:
            self._check_epoch(item)
        return item

    def end(self, error: Exception) -> None:
        """Drops the plans not taken yet; `next` raises the error."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(error)

    def _check_epoch(self, message: worker_pb2.StepPlan) -> None:
        first = self._first = self._first or message
        if (message.instance, message.epoch) != (first.instance, first.epoch):
            raise InvalidRequest("epoch", f"{message.epoch} on a stream of epoch {first.epoch}")


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

    def release(self, stream: PlanStream) -> None:
        """Does nothing where the stream does not hold the lease."""
        if self._holder is stream:
            self._holder = None
            self._free.set()

    async def released(self) -> None:
        """Waits until nobody holds it."""
        await self._free.wait()
