"""A rank that does not turn, or whose step takes too long, is found; an idle or starting one is not."""

import time
from pathlib import Path

import pytest

from worker_svc.progress import Progress, Watch, create_cells, open_cells

LONG_S = 30.0


def test_ranks_that_start_run_or_idle_are_fine(tmp_path: Path) -> None:
    watch = Watch(create_cells(tmp_path / "cells", 3), LONG_S)
    first, second = (Progress(open_cells(tmp_path / "cells", 3), rank) for rank in (0, 1))
    first.beat()
    second.beat()
    with second.step():
        assert watch.find_stalled() is None
        assert not second.stalled(LONG_S)


def test_a_rank_that_does_not_turn(tmp_path: Path) -> None:
    watch = Watch(create_cells(tmp_path / "cells", 2), 0.02)
    Progress(open_cells(tmp_path / "cells", 2), 1).beat()
    time.sleep(0.05)
    found = watch.find_stalled()
    assert found is not None and found.startswith("rank 1 has not turned")


def test_a_rank_that_waits_in_its_step_while_its_loop_turns(tmp_path: Path) -> None:
    """As in a collective whose other ranks never come."""
    watch = Watch(create_cells(tmp_path / "cells", 1), 0.02)
    progress = Progress(open_cells(tmp_path / "cells", 1), 0)
    with progress.step():
        time.sleep(0.05)
        progress.beat()
        found = watch.find_stalled()
        assert found is not None and found.startswith("rank 0 has made no progress")
        assert progress.stalled(0.02)
    progress.beat()
    assert watch.find_stalled() is None and not progress.stalled(0.0)


def test_steps_that_overlap_count_one_by_one(tmp_path: Path) -> None:
    """A stream of short steps, the next one always begun before one ends, is no stall."""
    watch = Watch(create_cells(tmp_path / "cells", 1), 0.1)
    progress = Progress(open_cells(tmp_path / "cells", 1), 0)
    progress.begin()
    for _ in range(5):
        time.sleep(0.03)
        progress.begin()
        progress.end()
    progress.beat()
    assert watch.find_stalled() is None
    time.sleep(0.12)
    progress.beat()
    assert watch.find_stalled() == f"rank 0 has made no progress in its step for {0.1:.1f} s"
    progress.end()
    assert watch.find_stalled() is None


def test_a_host_that_was_stopped_is_no_ranks_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launcher and rank stand still together; then the rank has its whole time again, and no more."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watch = Watch(create_cells(tmp_path / "cells", 1), 5.0)
    progress = Progress(open_cells(tmp_path / "cells", 1), 0)
    progress.beat()
    progress.begin()
    now += 60.0
    assert watch.find_stalled() is None
    for _ in range(10):
        now += 0.5
        assert watch.find_stalled() is None
    now += 0.5
    assert watch.find_stalled() == "rank 0 has not turned for 5.5 s"
