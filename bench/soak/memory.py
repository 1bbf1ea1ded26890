"""Memory and open files of processes over time, and whether they grow."""

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
MOST_MORE_FILES = 32
"""Connections come and go with what fails."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Of one process, from warm to its end."""

    role: str
    seconds: float
    warm_mib: float
    last_mib: float
    warm_files: int
    last_files: int

    @property
    def is_flat(self) -> bool:
        """Whether it stayed within the bounds."""
        more = max(MOST_GROWTH * self.warm_mib, MOST_GROWTH_MIB)
        return self.last_mib - self.warm_mib <= more and self.last_files - self.warm_files <= MOST_MORE_FILES


@dataclass(slots=True)
class Memory:
    """Samples by process."""

    samples: dict[tuple[str, int], list[tuple[float, float, int]]] = field(default_factory=dict)
    """(time, MiB, open files) by role and id."""

    def sample(self, processes: Iterable[tuple[str, psutil.Process]]) -> None:
        """Now."""
        now = time.monotonic()
        for role, process in processes:
            try:
                seen = now, process.memory_info().rss / (1 << 20), process.num_fds()
            except psutil.Error:
                continue
            self.samples.setdefault((role, process.pid), []).append(seen)

    def growths(self) -> list[Growth]:
        """Of every process that was warm for as long again; the most grown first."""
        found = []
        for (role, _), seen in self.samples.items():
            warm = [sample for sample in seen if sample[0] >= seen[0][0] + WARM_S]
            seconds = seen[-1][0] - seen[0][0]
            if seconds >= 2 * WARM_S:
                (_, warm_mib, warm_files), (_, last_mib, last_files) = warm[0], warm[-1]
                found.append(Growth(role, seconds, warm_mib, last_mib, warm_files, last_files))
        return sorted(found, key=lambda growth: growth.warm_mib - growth.last_mib)
