"""Starts the ranks of a worker group, watches them, and ends all when one ends or hangs. Knows no torch."""

import asyncio
import contextlib
import shutil
import signal
import subprocess
from pathlib import Path

from shared.certificates import Certificates
from shared.errors import StartupError, TandemError
from shared.metrics import serve_metrics
from shared.model_config import load_model_config
from shared.ports import require_free
from shared.process import STARTUP_FAILED, exited, kill, spawn, stop_signals
from shared.scratch import scratch_folder
from shared.security import flag
from shared.settings import to_json
from shared.tls import server_credentials
from shared.tokens import Tokens
from worker_svc.config import WorkerConfig
from worker_svc.model_checks import check_model
from worker_svc.progress import Cells, Watch, all_warm, create_cells
from worker_svc.stats import create_stats

_POLL_S = 0.1
_EXIT_S = 5.0  # from the end of draining to the end of the processes

_LOCAL_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}

# NVLink multicast is state of the switch that all GPUs of a host share: a process that is killed while it uses it can
# leave GPUs of others out of service. Nothing here needs it.
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

# Torch's own watch over NCCL reads the rendezvous file, which is gone once all ranks are warm; this module watches.
_NO_WATCHDOG = {"TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}


class WorkerFailed(TandemError):
    """A rank ended or hung, so the group can't go on."""


async def launch(config: WorkerConfig) -> None:
    """Runs a group until SIGTERM or SIGINT; a second signal does not wait for draining.

    Raises StartupError where the group can't start, WorkerFailed where a rank ends or makes no progress. Whatever
    happens, no rank outlives it.
    """
    check_model(config, load_model_config(config.folder))
    require_free(config.host, config.port)
    for name in ("metrics_port", "health_port"):
        if getattr(config, name) is not None:
            require_free(config.host, getattr(config, name), port_flag=flag(name))
    server_credentials(config)  # what is wrong with a file is told here, before anything is loaded
    if config.token_file is not None:
        Tokens(config.token_file)
    with stop_signals() as stopped, scratch_folder() as folder:
        cells = create_cells(folder / "progress", config.tensor_parallel)
        stats, certificates = create_stats(folder / "stats"), Certificates(config)
        if config.metrics_port is not None:
            serve_metrics(config.host, config.metrics_port, stats.metrics, certificates.metrics)
        watching = asyncio.create_task(certificates.watch())
        ranks = [_spawn(config, rank, folder) for rank in range(config.tensor_parallel)]
        try:
            await _watch(ranks, cells, config.step_timeout, folder, stopped)
            stopped.clear()
            await _stop(ranks[0], config.drain_timeout + _EXIT_S, stopped)
        finally:
            watching.cancel()
            kill(ranks)


def _spawn(config: WorkerConfig, rank: int, folder: Path) -> subprocess.Popen[bytes]:
    arguments = ["--config", to_json(config), "--rank", str(rank), "--folder", str(folder)]
    return spawn("worker_svc.main", arguments, rank_environment(config.threads))


def rank_environment(threads: int = 1) -> dict[str, str]:
    """What a rank's environment must hold besides, before it imports torch."""
    return {"OMP_NUM_THREADS": str(threads), **_LOCAL_ONLY, **_NO_MULTICAST, **_NO_WATCHDOG}


async def _watch(
    ranks: list[subprocess.Popen[bytes]], cells: Cells, step_timeout: float, folder: Path, stopped: asyncio.Event
) -> None:
    """Until told to stop. Raises what happened to the first rank that ends or hangs."""
    watch = Watch(cells, step_timeout)
    while not stopped.is_set():
        if all_warm(cells):  # mapped and connected: nothing is left behind should this process be killed
            shutil.rmtree(folder, ignore_errors=True)
        for rank, process in enumerate(ranks):
            if process.poll() is not None:
                raise _ended(rank, process.returncode, folder)
        if stalled := watch.find_stalled():
            raise WorkerFailed(f"{stalled}: the worker ends")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), _POLL_S)


def _ended(rank: int, status: int, folder: Path) -> TandemError:
    if status == STARTUP_FAILED:
        return StartupError((folder / f"{rank}.error").read_text(encoding="utf-8"))
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
    return WorkerFailed(f"rank {rank} {how}: the worker ends")


async def _stop(first: subprocess.Popen[bytes], grace_s: float, hurry: asyncio.Event) -> None:
    """Rank 0 drains; a second signal or the end of the grace cuts that short. The others have nothing to save."""
    first.terminate()
    ends = [asyncio.create_task(exited(first)), asyncio.create_task(hurry.wait())]
    await asyncio.wait(ends, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
