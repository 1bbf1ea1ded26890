"""Memory that host and GPU share, for the steps in flight. No copy is launched: kernels read and write it themselves.

A lane is one step's part: the changes that it brings, the tokens that it samples. A step takes one and whoever reads
its tokens gives it back, so at most as many steps are in flight as there are lanes. The device takes the lanes in turn.
"""

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shared.types import DEPTH_LIMIT, IntArray
from worker_svc.kernels.deliver import Ring
from worker_svc.runner.outcome import StepLogprobs, StepTokens
from worker_svc.step_inputs import Bools

_LANES = 8
assert _LANES > DEPTH_LIMIT, "a step begins while as many as a scheduler may have out are not read yet"


class Event(Protocol):
    """A point in the order of what was launched."""

    def record(self) -> None:
        """After what was launched so far."""

    def synchronize(self) -> None:
        """Waits until the device has come there."""


class NoEvent:
    """Where the device is the host: what was launched has ended. See Event."""

    def record(self) -> None:
        """See Event."""

    def synchronize(self) -> None:
        """See Event."""


class CudaEvent:
    """On the stream that is current now. See Event."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.current_stream()

    def record(self) -> None:
        """See Event."""
        self._event.record(self._stream)

    def synchronize(self) -> None:
        """See Event."""
        self._event.synchronize()


class Lane:
    """One step's memory."""

    def __init__(self, changes: Tensor, sampled: Tensor, done: Event) -> None:
        """`changes` [2 x most] and `sampled` [2, S], int32, in memory that host and device share."""
        self.sampled = sampled
        """Token ids, and 1 where a row failed; known once `done`."""
        self.done = done
        self._changes = changes
        self._host_changes: IntArray = changes.numpy()
        self._host_sampled: IntArray = sampled.numpy()

    def stage(self, changes: IntArray) -> Tensor:
        """`changes` [2, n], as the device reads them."""
        self._host_changes[: changes.size] = changes.ravel()
        return self._changes[: changes.size].view(2, -1)

    def wait(self) -> IntArray:
        """`sampled`, once it is there."""
        self.done.synchronize()
        return self._host_sampled


class Lanes:
    """All lanes of a runner."""

    def __init__(
        self, most_changes: int, rows: int, device: torch.device, make_event: Callable[[], Event] | None = None
    ) -> None:
        pinned = device.type == "cuda"
        sampled = torch.zeros(_LANES, 2, rows, dtype=torch.int32, pin_memory=pinned)
        self.ring = Ring(sampled, torch.zeros(1, dtype=torch.int32, device=device))
        """Where the device writes."""
        make_event = make_event or (CudaEvent if pinned else NoEvent)
        changes = torch.zeros(_LANES, 2 * most_changes, dtype=torch.int32, pin_memory=pinned)
        self._lanes = [Lane(changes[index], sampled[index], make_event()) for index in range(_LANES)]
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.restart()

    def restart(self) -> None:
        """The device begins with the first lane. Nothing may be in flight."""
        self.ring.turn.zero_()
        self._turn = 0
        while not self._free.empty():
            self._free.get()
        for _ in self._lanes:
            self._free.put(None)

    def take(self) -> Lane:
        """Waits until the lane that the device writes next is free."""
        self._free.get()
        return self._lanes[self._turn % _LANES]

    def delivered(self) -> None:
        """What writes the taken lane's tokens was launched: the next lane is its successor."""
        self._turn += 1

    def give_back(self) -> None:
        """Nothing reads or writes any more what was taken first."""
        self._free.put(None)


@dataclass(frozen=True, slots=True)
class LaneTokens:
    """See runner.PendingTokens."""

    lane: Lane
    lanes: Lanes
    samples: Bools
    """[R]: the rows that sample."""
    logprobs: StepLogprobs
    """Sent before the lane is done."""

    def to_host(self) -> StepTokens:
        """See PendingTokens."""
        try:
            token_ids, failed = self.lane.wait()[:, : len(self.samples)][:, self.samples]
        finally:
            self.lanes.give_back()
        return StepTokens(token_ids, np.flatnonzero(failed).astype(np.int32), *self.logprobs.pack())
