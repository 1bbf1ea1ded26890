"""One node of a worker group: meets the others, starts its ranks, watches them, and ends all when one ends or hangs.

Mostly a group is one node. Knows no torch.
"""

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

from shared.certificates import Certificates
from shared.metrics import serve_metrics
from shared.model_config import ModelConfig, load_model_config
from shared.ports import require_free
from shared.process import kill, spawn, stop_signals
from shared.scratch import scratch_folder
from shared.settings import flag, to_json
from shared.tls import server_credentials
from shared.tokens import Tokens
from worker_svc.config import WorkerConfig
from worker_svc.environment import rank_environment
from worker_svc.model_checks import check_model
from worker_svc.node import Node
from worker_svc.node_health import NodeHealth
from worker_svc.node_meeting import Meeting, meet
from worker_svc.nodes import terms
from worker_svc.stats import create_stats
from worker_svc.store import Store


async def launch(config: WorkerConfig) -> None:
    """Runs a node until SIGTERM or SIGINT; a second signal does not wait for draining.

    Raises StartupError where it can't start, WorkerFailed where a rank ends or makes no progress, NodeLost where
    another node does. Whatever happens, no rank outlives it.
    """
    model = load_model_config(config.folder)
    check_model(config, model)
    _check_ports_and_files(config)
    with stop_signals() as stopped, scratch_folder() as folder:
        async with _health(config) as health:
            meeting = await _meet(config, model, stopped)
            if meeting is not None:
                await _run(config, meeting, folder, stopped, health)


def _check_ports_and_files(config: WorkerConfig) -> None:
    """What is wrong is told here, before anything is loaded."""
    require_free(config.host, config.port)
    for name in ("metrics_port", "health_port"):
        if getattr(config, name) is not None:
            require_free(config.host, getattr(config, name), port_flag=flag(name))
    server_credentials(config)
    if config.token_file is not None:
        Tokens(config.token_file)


@contextlib.asynccontextmanager
async def _health(config: WorkerConfig) -> AsyncIterator[NodeHealth | None]:
    """None on node 0, where rank 0 answers probes."""
    if config.node_rank == 0:
        yield None
        return
    health = NodeHealth(config)
    await health.start()
    try:
        yield health
    finally:
        await health.stop()


async def _meet(config: WorkerConfig, model: ModelConfig, stopped: asyncio.Event) -> Meeting | None:
    """None where it is stopped before all have come."""
    if config.nnodes == 1:
        return Meeting()
    meeting, stopping = asyncio.create_task(meet(config, terms(config, model))), asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait([meeting, stopping], return_when=asyncio.FIRST_COMPLETED)
        return meeting.result() if meeting.done() else None
    finally:
        meeting.cancel()
        stopping.cancel()
        await asyncio.wait([meeting])


async def _run(
    config: WorkerConfig, meeting: Meeting, folder: Path, stopped: asyncio.Event, health: NodeHealth | None
) -> None:
    node = Node(config, meeting.links, folder, health)
    stats, certificates = create_stats(folder / "stats"), Certificates(config)
    if config.metrics_port is not None:  # whoever scrapes all pods of a group finds them alive, and counts steps once
        steps = list if config.node_rank else stats.metrics
        serve_metrics(config.host, config.metrics_port, steps, certificates.metrics)
    watching = asyncio.create_task(certificates.watch())
    try:
        environment = rank_environment(config.threads, meeting.links[0].peer_host if meeting.links else None)
        for rank in config.ranks:
            listener = meeting.listener if rank == 0 else None
            node.ranks.append(_spawn(config, rank, folder, meeting.store, environment, listener))
        if meeting.listener is not None:
            meeting.listener.close()
        await node.run(stopped)
    finally:
        watching.cancel()
        kill(node.ranks)
        for link in meeting.links:
            await link.close()


def _spawn(
    config: WorkerConfig,
    rank: int,
    folder: Path,
    store: Store | None,
    environment: Mapping[str, str],
    listener: socket.socket | None,
) -> subprocess.Popen[bytes]:
    arguments = ["--config", to_json(config), "--rank", str(rank), "--folder", str(folder)]
    if store is not None:
        handle = None if listener is None else listener.fileno()
        arguments += ["--store", to_json(replace(store, listener=handle))]
    return spawn("worker_svc.main", arguments, environment, listener=listener)
