"""Signs of life of the ranks of one group, in memory that they share with their launcher.

A rank says when it last turned and since when it has been executing a step; whoever reads decides what is too long.
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
"""[ranks, 3]: time of the last beat, start of the running step or 0, and 1 once the rank is warm."""

BEAT_S = 0.1
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
        self._cells[self._rank, 1] = time.monotonic()
        try:
            yield
        finally:
            self._cells[self._rank, 1] = 0.0

    def stalled(self, timeout_s: float) -> bool:
        """Whether the running step takes longer than that."""
        since = float(self._cells[self._rank, 1])
        return since > 0 and time.monotonic() - since > timeout_s


def all_warm(cells: Cells) -> bool:
    """Whether every rank has started."""
    return bool(cells[:, 2].all())


def find_stalled(cells: Cells, timeout_s: float) -> str | None:
    """What to tell a person about the first rank that does not turn or whose step takes too long."""
    now = time.monotonic()
    for rank, (beat, since, _) in enumerate(cells.tolist()):
        if now - beat > timeout_s:
            return f"rank {rank} has not turned for {now - beat:.1f} s"
        if since and now - since > timeout_s:
            return f"rank {rank} has made no progress in its step for {now - since:.1f} s"
    return None
