"""Copies between host and GPU of steps in flight, beside the stream that computes.

A lane is the memory of one step: what it sends, what it brings back. A step takes one and whoever reads its tokens
gives it back, so at most as many steps are in flight as there are lanes.
"""

import queue
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shared.types import DEPTH_LIMIT, IntArray
from worker_svc.step_inputs import LongArray


class Lane(Protocol):
    """One step's copies."""

    def upload(self, changes: IntArray) -> Tensor:
        """[2, n] on the device, for what is launched next."""

    def download(self, sampled: Tensor) -> None:
        """Begins to copy token ids and failures, [2, S], once what was launched before has computed them."""

    def wait(self) -> IntArray:
        """[2, S], once they are here."""


class Lanes:
    """Lanes that no step has."""

    def __init__(self, lanes: list[Lane]) -> None:
        self._free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        for lane in lanes:
            self._free.put(lane)

    def take(self) -> Lane:
        """Waits for one."""
        return self._free.get()

    def give_back(self, lane: Lane) -> None:
        """Nothing reads or writes it any more."""
        self._free.put(lane)


@dataclass(frozen=True, slots=True)
class LaneTokens:
    """See runner.PendingTokens."""

    lane: Lane
    lanes: Lanes
    rows: LongArray
    """[N]: the rows that sample."""

    def to_host(self) -> tuple[IntArray, IntArray]:
        """See PendingTokens."""
        token_ids, failed = self.lane.wait()[:, self.rows]
        self.lanes.give_back(self.lane)
        return token_ids, np.flatnonzero(failed).astype(np.int32)


class CudaLane:
    """Pinned memory, and events on the streams of the copies."""

    def __init__(self, most_changes: int, rows: int, device: torch.device, streams: tuple[torch.cuda.Stream, ...]):
        self._sent = torch.empty(2 * most_changes, dtype=torch.int32, pin_memory=True)
        self._received = torch.empty(2 * most_changes, dtype=torch.int32, device=device)
        self._sampled = torch.empty(2, rows, dtype=torch.int32, device=device)
        self._host = torch.empty(2, rows, dtype=torch.int32, pin_memory=True)
        self._up, self._down = streams
        self._uploaded, self._computed, self._downloaded = (torch.cuda.Event() for _ in range(3))  # type: ignore[no-untyped-call]

    def upload(self, changes: IntArray) -> Tensor:
        """See Lane."""
        count = changes.size
        self._sent.numpy()[:count] = changes.ravel()
        with torch.cuda.stream(self._up):
            self._received[:count].copy_(self._sent[:count], non_blocking=True)
            self._uploaded.record()
        self._uploaded.wait()
        return self._received[:count].view(2, -1)

    def download(self, sampled: Tensor) -> None:
        """See Lane. The next step may overwrite `sampled` at once."""
        self._sampled.copy_(sampled)
        self._computed.record()
        with torch.cuda.stream(self._down):
            self._computed.wait()
            self._host.copy_(self._sampled, non_blocking=True)
            self._downloaded.record()

    def wait(self) -> IntArray:
        """See Lane."""
        self._downloaded.synchronize()
        values: IntArray = self._host.numpy()
        return values


def cuda_lanes(most_changes: int, rows: int, device: torch.device) -> Lanes:
    """One more than a scheduler may have steps out."""
    streams = tuple(torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
    return Lanes([CudaLane(most_changes, rows, device, streams) for _ in range(DEPTH_LIMIT + 1)])
