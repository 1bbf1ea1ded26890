"""Signs of life of the ranks of one group, in memory that they share with their launcher.

A rank says when it last turned and since when its oldest step has been running; whoever reads decides what is too long.
Times are seconds of the monotonic clock, which all processes of a host share.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Cells: TypeAlias = NDArray[np.float64]
"""[ranks of one node, 3]: time of the last beat, start of the running step or 0, and 1 once the rank is warm."""

BEAT_S = 0.1
_ASLEEP_S = 1.0  # between two looks of a launcher that turns
_STARTUP_S = 60.0  # until a rank's first beat: imports take long on a busy machine


def create_cells(path: Path, ranks: int) -> Cells:
    """A file of cells for ranks that are about to start."""
    cells = np.memmap(path, dtype=np.float64, mode="w+", shape=(ranks, 3))
    cells[:, 0] = time.monotonic() + _STARTUP_S
    return cells


def open_cells(path: Path, ranks: int) -> Cells:
    """The cells that the launcher created."""
    return np.memmap(path, dtype=np.float64, mode="r+", shape=(ranks, 3))


class Progress:
    """One rank's own cells."""

    def __init__(self, cells: Cells, rank: int) -> None:
        self._cells = cells
        self._rank = rank
        self._running = 0
        self._lock = threading.Lock()  # steps are begun in one thread and ended in another

    def beat(self) -> None:
        """This rank turns."""
        self._cells[self._rank, 0] = time.monotonic()

    def warm(self) -> None:
        """This rank has loaded its part: from now on nothing can go wrong about its start."""
        self._cells[self._rank, 2] = 1.0

    def beat_in_thread(self) -> None:
        """For a rank without an event loop: beats until the process ends."""

        def loop() -> None:
            while True:
                self.beat()
                time.sleep(BEAT_S)

        threading.Thread(target=loop, daemon=True).start()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """This rank executes a step inside of the block."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """A step begins, perhaps while others run."""
        with self._lock:
            if self._running == 0:
                self._cells[self._rank, 1] = time.monotonic()
            self._running += 1

    def end(self) -> None:
        """The oldest step has ended; the next one counts from now."""
        with self._lock:
            self._running -= 1
            self._cells[self._rank, 1] = time.monotonic() if self._running else 0.0

    def stalled(self, timeout_s: float) -> bool:
        """Whether the running step takes longer than that."""
        since = float(self._cells[self._rank, 1])
        return since > 0 and time.monotonic() - since > timeout_s


def all_warm(cells: Cells) -> bool:
    """Whether every rank has started."""
    return bool(cells[:, 2].all())


class Watch:
    """Looks for ranks that hang. Counts only the time in which it looks itself: where the whole host is stopped for a
    while, no rank is to blame."""

    def __init__(self, cells: Cells, timeout_s: float, first_rank: int = 0) -> None:
        """`cells` are those of one node, whose ranks begin with `first_rank`."""
        self._cells = cells
        self._first_rank = first_rank
        self._timeout_s = timeout_s
        self._looked = self._awake_since = time.monotonic()

    def find_stalled(self) -> str | None:
        """What to tell a person about the first rank that does not turn or whose step takes too long. To be called
        several times a second."""
        now = time.monotonic()
        if now - self._looked > _ASLEEP_S:
            self._awake_since = now
        self._looked = now
        for rank, (beat, step, _) in enumerate(self._cells.tolist(), self._first_rank):
            if (silent := now - max(beat, self._awake_since)) > self._timeout_s:
                return f"rank {rank} has not turned for {silent:.1f} s"
            if step and (running := now - max(step, self._awake_since)) > self._timeout_s:
                return f"rank {rank} has made no progress in its step for {running:.1f} s"
        return None
