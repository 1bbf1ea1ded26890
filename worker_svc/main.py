"""Entry points of the worker: `run` starts a group, `python -m worker_svc.main` is one rank of it.

Imports no torch until a rank needs it, so that the command line and the launcher stay light.
"""

import argparse
import asyncio
import gc
import os
import sys
from functools import partial
from pathlib import Path
from typing import NoReturn

import structlog

from shared.errors import StartupError, TandemError
from shared.process import STARTUP_FAILED, die_with_parent
from shared.settings import from_json
from shared.telemetry import configure_logging
from worker_svc.config import WorkerConfig
from worker_svc.launcher import launch
from worker_svc.progress import Progress, open_cells
from worker_svc.stats import open_stats
from worker_svc.store import Store

_log = structlog.get_logger(__name__)


def run(config: WorkerConfig) -> int:
    """Runs one node of a worker group, mostly all of it, until SIGTERM or SIGINT; exit status 0.

    Raises StartupError where it can't start, WorkerFailed where a rank ends or hangs, NodeLost where another node does:
    one line each.
    """
    asyncio.run(launch(config))
    return 0


def run_rank(config: WorkerConfig, rank: int, folder: Path, store: Store | None) -> int:
    """One rank, until the launcher (rank 0) or rank 0 (the others) says to stop; the exit status.

    Why it can't start is left in the folder for the launcher, which tells it once for all ranks.
    """
    configure_logging(f"worker rank {rank}")
    progress = Progress(open_cells(folder / "progress", len(config.ranks)), config.ranks.index(rank))
    rendezvous = store or folder / "rendezvous"
    try:
        if rank == 0:
            _run_first(config, folder, rendezvous, progress)
        else:
            _run_follower(config, rank, rendezvous, progress)
    except (StartupError, ModuleNotFoundError) as error:
        hint = "" if isinstance(error, StartupError) else ": pip install 'tandem-serve[worker]'"
        (folder / f"{rank}.error").write_text(f"{error}{hint}", encoding="utf-8")
        return STARTUP_FAILED
    except Exception as error:
        _log.error("rank failed", problem=str(error), exc_info=not isinstance(error, TandemError))
        return 1
    return 0


def _run_first(config: WorkerConfig, folder: Path, rendezvous: Path | Store, progress: Progress) -> None:
    import uvloop

    from worker_svc.serve import serve

    uvloop.run(serve(config, rendezvous, progress, open_stats(folder / "stats")))


def _run_follower(config: WorkerConfig, rank: int, rendezvous: Path | Store, progress: Progress) -> None:
    from shared.model_config import load_model_config
    from worker_svc.runner.build import start_rank
    from worker_svc.runner.group import follow

    progress.beat_in_thread()
    runner, group = start_rank(config, load_model_config(config.folder), rank, rendezvous)
    progress.warm()
    follow(runner, group, progress)


def main() -> NoReturn:
    """Parses what the launcher passes."""
    die_with_parent()
    gc.disable()  # until start_rank is done: torch makes 250,000 objects that all stay
    parser = argparse.ArgumentParser(description="One rank of a worker group")
    parser.add_argument("--config", required=True, type=partial(from_json, WorkerConfig), help="settings as JSON")
    parser.add_argument("--rank", required=True, type=int)
    parser.add_argument("--folder", required=True, type=Path, help="the node's folder for rendezvous and progress")
    parser.add_argument("--store", type=partial(from_json, Store), help="where ranks of several nodes meet, as JSON")
    arguments = parser.parse_args()
    status = run_rank(arguments.config, arguments.rank, arguments.folder, arguments.store)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # destructors of collectives would abort where a peer has died, and wait for graphs that use them


if __name__ == "__main__":
    main()
