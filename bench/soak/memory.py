"""Memory of processes over time, and whether it grows."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import psutil

WARM_S = 30.0
"""Of its life, before a process's memory counts."""
MOST_GROWTH = 0.1
"""Of what it had when warm."""
MOST_GROWTH_MIB = 16.0
"""Or so much, whichever is more: pages that are touched late."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Of one process, from warm to its end."""

    role: str
    seconds: float
    warm_mib: float
    last_mib: float

    @property
    def is_flat(self) -> bool:
        """Whether it stayed within the bounds."""
        return self.last_mib - self.warm_mib <= max(MOST_GROWTH * self.warm_mib, MOST_GROWTH_MIB)


@dataclass(slots=True)
class Memory:
    """Samples by process."""

    samples: dict[tuple[str, int], list[tuple[float, float]]] = field(default_factory=dict)
    """(time, MiB) by role and id."""

    def sample(self, processes: Iterable[tuple[str, psutil.Process]]) -> None:
        """Now."""
        now = time.monotonic()
        for role, process in processes:
            try:
                mib = process.memory_info().rss / (1 << 20)
            except psutil.NoSuchProcess:
                continue
            self.samples.setdefault((role, process.pid), []).append((now, mib))

    def growths(self) -> list[Growth]:
        """Of every process that was warm for as long again; the most grown first."""
        found = []
        for (role, _), seen in self.samples.items():
            warm = [mib for at, mib in seen if at >= seen[0][0] + WARM_S]
            seconds = seen[-1][0] - seen[0][0]
            if seconds >= 2 * WARM_S:
                found.append(Growth(role, seconds, warm[0], warm[-1]))
        return sorted(found, key=lambda growth: growth.warm_mib - growth.last_mib)
