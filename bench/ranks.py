"""The ranks of one group as processes of a benchmark, as the worker's launcher starts them."""

import sys
import time
from collections.abc import Sequence

from shared.process import kill, spawn
from worker_svc.environment import rank_environment


def run_ranks(module: str, ranks: int, arguments: Sequence[str]) -> None:
    """`python -m MODULE RANK ARGUMENTS...` for each, to their ends. Exits where one fails; what it says is seen."""
    started = [spawn(module, [str(rank), *arguments], rank_environment()) for rank in range(ranks)]
    while any(rank.poll() is None for rank in started) and not any(rank.poll() for rank in started):
        time.sleep(0.1)
    kill(started)
    if any(rank.returncode for rank in started):
        sys.exit("a rank failed: see its message above")
