"""What ran on a GPU and when, by torch's profiler, and what a step takes of it. Knows no engine.

All ranks' times are of one clock. A kernel may start before the one ahead has ended: what it adds is the time from that
one's end to its own, so that a step's kernels together add what the GPU is busy.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity, profile

DECODE, MIXED = "_decode_kernel", "_mixed_kernel"  # the first of a step: kernels.prepare, kernels.prepare_mixed
_COLLECTIVES = ("all_reduce", "all_gather", "nccl")

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Trace:
    """Kernels and copies of one GPU, by start."""

    kinds: list[str]
    """Names."""
    names: NDArray[np.int64]
    """Index of each among them."""
    starts: Floats
    """Microseconds."""
    ends: Floats


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kind of kernel or copy in a step."""

    name: str
    calls: float
    us: float
    """From start to end."""
    added_us: float
    """By which it ended after all that began before it; less what passed with nothing running."""


@dataclass(frozen=True, slots=True)
class RankTime:
    """One GPU's part in a step."""

    busy_share: float
    collectives_us: float
    waiting_us: float
    """Of that: until the last rank has begun the same collective."""
    kernels: list[Kernel]


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step of a kind, averages."""

    steps: int
    period_us: float
    between_us: float
    """In which nothing runs just before the next step's first kernel."""
    ranks: list[RankTime]


@contextmanager
def recorded(path: Path) -> Iterator[None]:
    """Writes what this process has on its GPU during the block."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield
    results: Any = profiler.profiler
    found = [event for event in results.kineto_results.events() if event.device_type().name == "CUDA"]
    found.sort(key=lambda event: event.start_ns())
    starts = np.array([event.start_ns() for event in found]) / 1e3
    lengths = np.array([event.duration_ns() for event in found]) / 1e3
    kinds: dict[str, int] = {}
    names = np.array([kinds.setdefault(event.name(), len(kinds)) for event in found])
    np.savez(path, kinds=np.array(list(kinds)), names=names, starts=starts, ends=starts + lengths)


def load_trace(path: Path) -> Trace:
    """What `recorded` wrote."""
    file = np.load(path)
    return Trace(file["kinds"].tolist(), file["names"], file["starts"], file["ends"])


def step_times(traces: Sequence[Trace], kind: str, skipped: int, most: int | None = None) -> StepTime | None:
    """Of at most so many steps that begin with the kernel `kind`, after the first ones; None: there are none."""
    cut = [_Steps(trace, kind, skipped, most) for trace in traces]
    steps = int(cut[0].chosen.sum())
    if not steps:
        return None
    meetings = [steps_of.collectives() for steps_of in cut]
    last = np.maximum.reduce([starts for starts, _ in meetings])
    ranks = [
        RankTime(
            busy_share=round(1 - steps_of.idle() / steps_of.span(), 4),
            collectives_us=round(float((ends - starts).sum()) / steps, 1),
            waiting_us=round(float((np.minimum(last, ends) - starts).sum()) / steps, 1),
            kernels=steps_of.kernels(),
        )
        for steps_of, (starts, ends) in zip(cut, meetings, strict=True)
    ]
    first = cut[0]
    return StepTime(steps, round(first.span() / steps, 1), round(first.between(), 1), ranks)


class _Steps:
    """A trace cut into steps, of which some are chosen."""

    def __init__(self, trace: Trace, kind: str, skipped: int, most: int | None) -> None:
        first = np.flatnonzero(_named(trace, lambda name: name in (DECODE, MIXED)))
        self._trace = trace
        self._bounds = trace.starts[first]
        ended = np.flatnonzero(_named(trace, kind.__eq__)[first[:-1]])  # the last one has no end
        self.chosen = np.isin(np.arange(len(first)), ended[skipped:][:most])
        """[steps]"""
        step = np.searchsorted(self._bounds, trace.starts, side="right") - 1
        self._inside = (step >= 0) & self.chosen[np.maximum(step, 0)]
        ends = np.maximum.accumulate(trace.ends)
        self._gaps = np.maximum(trace.starts[1:] - ends[:-1], 0)  # before each event but the first
        self._added = np.diff(ends, prepend=trace.starts[:1])
        self._added[1:] -= self._gaps
        self._begins = np.isin(np.arange(1, len(trace.starts)), first)

    def span(self) -> float:
        """Microseconds of all chosen steps."""
        return float(np.diff(self._bounds)[self.chosen[:-1]].sum())

    def idle(self) -> float:
        """Of that, those in which nothing runs."""
        return float(self._gaps[self._inside[:-1]].sum())

    def between(self) -> float:
        """Mean of what passes with nothing running before the next step's first kernel."""
        return float(self._gaps[self._inside[:-1] & self._begins].mean())

    def collectives(self) -> tuple[Floats, Floats]:
        """Starts and ends, in the order that all ranks have."""
        is_one = _named(self._trace, lambda name: any(part in name for part in _COLLECTIVES))
        inside = self._inside & is_one
        return self._trace.starts[inside], self._trace.ends[inside]

    def kernels(self) -> list[Kernel]:
        """By the time that they add together."""
        names, steps = self._trace.names[self._inside], int(self.chosen.sum())
        lengths = (self._trace.ends - self._trace.starts)[self._inside]
        sums = [np.bincount(names, weights) / steps for weights in (None, lengths, self._added[self._inside])]
        calls, times, added = (values.tolist() for values in sums)
        return [
            Kernel(self._trace.kinds[name], calls[name], round(times[name], 2), round(added[name], 2))
            for name in sorted(set(names.tolist()), key=lambda name: -added[name])
        ]


def _named(trace: Trace, is_one: Callable[[str], bool]) -> NDArray[np.bool_]:
    """Which events have such a name."""
    return np.array([is_one(kind) for kind in trace.kinds])[trace.names]
