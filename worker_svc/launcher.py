"""Starts the ranks of a worker group, watches them, and ends all when one ends or hangs. Knows no torch."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

from shared.errors import StartupError, TandemError
from shared.model_config import load_model_config
from shared.process import exited, kill, spawn
from worker_svc.config import WorkerConfig
from worker_svc.model_checks import check_model
from worker_svc.progress import Cells, create_cells, find_stalled

_POLL_S = 0.1
_EXIT_S = 5.0  # from the end of draining to the end of the processes


class WorkerFailed(TandemError):
    """The group ended without being told to."""


async def launch(config: WorkerConfig) -> None:
    """Runs the group until SIGTERM or SIGINT; a second signal does not wait for draining.

    Raises StartupError where the group can't start, WorkerFailed where a rank ends or makes no progress.
    """
    check_model(config, load_model_config(config.folder))
    _check_port(config.host, config.port)
    with tempfile.TemporaryDirectory(prefix="tandem-worker-") as name:
        folder = Path(name)
        cells = create_cells(folder / "progress", config.tensor_parallel)
        ranks = [_spawn(config, rank, folder) for rank in range(config.tensor_parallel)]
        try:
            await _supervise(config, ranks, cells, folder)
        finally:
            kill(ranks)


async def _supervise(config: WorkerConfig, ranks: list[subprocess.Popen[bytes]], cells: Cells, folder: Path) -> None:
    signals: asyncio.Queue[None] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, None)
    told = asyncio.create_task(signals.get())
    failed = asyncio.create_task(_failure(ranks, cells, config.step_timeout))
    await asyncio.wait((told, failed), return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        told.cancel()
        reason = _startup_error(folder)
        raise StartupError(reason) if reason else WorkerFailed(failed.result())
    failed.cancel()
    ranks[0].terminate()
    ended = asyncio.create_task(_all_exited(ranks))
    again = asyncio.create_task(signals.get())
    await asyncio.wait((ended, again), timeout=config.drain_timeout + _EXIT_S, return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    again.cancel()


async def _all_exited(ranks: list[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        await exited(rank)


async def _failure(ranks: list[subprocess.Popen[bytes]], cells: Cells, step_timeout: float) -> str:
    """Waits for the first rank that ends or hangs; what happened, in one line."""
    while True:
        for rank, process in enumerate(ranks):
            if process.poll() is not None:
                return f"rank {rank} {_status(process.returncode)}"
        stalled = find_stalled(cells, step_timeout)
        if stalled:
            return stalled
        await asyncio.sleep(_POLL_S)


def _startup_error(folder: Path) -> str | None:
    """What a rank left behind that could not start."""
    return next((path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.error"))), None)


def _status(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def _spawn(config: WorkerConfig, rank: int, folder: Path) -> subprocess.Popen[bytes]:
    arguments = ["--config", config.to_json(), "--rank", str(rank), "--folder", str(folder)]
    environment = {"OMP_NUM_THREADS": str(config.threads), "GLOO_SOCKET_IFNAME": "lo"}
    return spawn("worker_svc.main", arguments, environment)


def _check_port(host: str, port: int) -> None:
    """Early and clear; rank 0 binds it for good. A plain bind: no sharing of the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise StartupError(f"can't listen on {host}:{port}: {error.strerror}") from None
