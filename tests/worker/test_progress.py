"""A rank that does not turn, or whose step takes too long, is found; an idle or starting one is not."""

import time
from pathlib import Path

from worker_svc.progress import Progress, create_cells, find_stalled, open_cells

LONG_S = 30.0


def test_ranks_that_start_run_or_idle_are_fine(tmp_path: Path) -> None:
    cells = create_cells(tmp_path / "cells", 3)
    first, second = (Progress(open_cells(tmp_path / "cells", 3), rank) for rank in (0, 1))
    first.beat()
    second.beat()
    with second.step():
        assert find_stalled(cells, LONG_S) is None
        assert not second.stalled(LONG_S)


def test_a_rank_that_does_not_turn(tmp_path: Path) -> None:
    cells = create_cells(tmp_path / "cells", 2)
    Progress(open_cells(tmp_path / "cells", 2), 1).beat()
    time.sleep(0.05)
    found = find_stalled(cells, 0.02)
    assert found is not None and found.startswith("rank 1 has not turned")


def test_a_rank_that_waits_in_its_step_while_its_loop_turns(tmp_path: Path) -> None:
    """As in a collective whose other ranks never come."""
    cells = create_cells(tmp_path / "cells", 1)
    progress = Progress(open_cells(tmp_path / "cells", 1), 0)
    with progress.step():
        time.sleep(0.05)
        progress.beat()
        found = find_stalled(cells, 0.02)
        assert found is not None and found.startswith("rank 0 has made no progress")
        assert progress.stalled(0.02)
    progress.beat()
    assert find_stalled(cells, LONG_S) is None and not progress.stalled(0.0)


def test_steps_that_overlap_count_one_by_one(tmp_path: Path) -> None:
    """A stream of short steps, the next one always begun before one ends, is no stall."""
    cells = create_cells(tmp_path / "cells", 1)
    progress = Progress(open_cells(tmp_path / "cells", 1), 0)
    progress.begin()
    for _ in range(5):
        time.sleep(0.03)
        progress.begin()
        progress.end()
    progress.beat()
    assert find_stalled(cells, 0.1) is None
    time.sleep(0.12)
    progress.beat()
    assert find_stalled(cells, 0.1) == f"rank 0 has made no progress in its step for {0.1:.1f} s"
    progress.end()
    assert find_stalled(cells, 0.1) is None
