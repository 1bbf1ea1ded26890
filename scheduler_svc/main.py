"""The scheduler's parent process: starts the core and the frontends, keeps them running, stops them in order.

Serves no requests itself, and all metrics. The core listens on a Unix socket in a private folder; frontends share
the public port.
"""

import asyncio
import os
import secrets
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import structlog

from scheduler_svc.config import HANDOFF, SchedulerConfig
from scheduler_svc.frontend.config import FrontendConfig
from scheduler_svc.frontend.tracing import require_tracing
from scheduler_svc.metrics_hub import MetricsHub
from scheduler_svc.watchdog import watch_core, watch_frontend
from shared.certificates import Certificates
from shared.dialer import Dialer
from shared.errors import StartupError
from shared.metrics import serve_metrics
from shared.model_config import load_model_config
from shared.ports import LOOPBACK, address, require_free, unix_endpoint
from shared.process import STARTUP_FAILED, Supervisor, stop_signals
from shared.rpc import until_serving
from shared.scratch import scratch_folder
from shared.settings import to_json
from shared.tls import server_credentials
from shared.tokens import Tokens

LONGEST_SOCKET_PATH = 107
"""Bytes; Linux's sockaddr_un holds 108 with the NUL at the end."""

_log = structlog.get_logger(__name__)


async def run(config: SchedulerConfig) -> int:
    """Serves until SIGINT or SIGTERM; the exit status. Prints one line when ready. A second signal ends the drain.

    Raises StartupError for a bad model folder or a busy port.
    """
    name = load_model_config(config.model, config.model_name).name
    require_free(config.host, config.port)
    if config.health_port is not None:
        require_free(config.host, config.health_port, port_flag="--health-port")
    _check_security(config)
    if config.otlp_endpoint is not None:
        require_tracing()
    with stop_signals() as stopped, scratch_folder() as folder:
        family = Supervisor()
        certificates = Certificates(config)
        socket_path = _socket_path(folder, "core.sock")
        metrics_socket = await _serve_metrics(config, folder, certificates)
        arguments = ["--config", to_json(config), "--scheduler", str(secrets.randbits(64)), "--socket", socket_path]
        arguments += ["--metrics-socket", str(metrics_socket)] if metrics_socket else []
        family.start("core", "scheduler_svc.core_process", arguments)
        healths = [Path(_socket_path(folder, f"f{number}.sock")) for number in range(config.frontends)]
        frontends = [_frontend(config, Path(socket_path), metrics_socket, health) for health in healths]
        for number, frontend in enumerate(frontends):
            family.start(f"frontend-{number}", "scheduler_svc.frontend.main", ["--config", to_json(frontend)])
        watching = [asyncio.create_task(dog) for dog in _watchdogs(config, family, socket_path, frontends)]
        watching.append(asyncio.create_task(certificates.watch()))
        announcement = f"tandem scheduler ready on {address(config.host, config.port)} (model {name})"
        failed = await family.run(stopped, _until_ready(frontends), announcement)
        for dog in watching:
            dog.cancel()
        await family.stop((key for key in family.children if key != "core"), config.drain_timeout + 1.0, stopped)
        await family.stop(["core"], 1.0, stopped)
        return STARTUP_FAILED if failed else 0


def _check_security(config: SchedulerConfig) -> None:
    """Once, before every child would tell the same."""
    credentials = server_credentials(config)
    Dialer(config.worker_security)
    Dialer(config.peer_security)
    if config.token_file is not None:
        Tokens(config.token_file)
        if credentials is None and config.host not in (LOOPBACK, "::1", "localhost"):
            _log.warning("tokens cross the network in plain text: give --tls-cert and --tls-key", host=config.host)


async def _serve_metrics(config: SchedulerConfig, folder: Path, certificates: Certificates) -> Path | None:
    """The socket that takes the children's metrics, if there is an endpoint to tell them."""
    if config.metrics_port is None:
        return None
    require_free(config.host, config.metrics_port, port_flag="--metrics-port")
    path, hub = _socket_path(folder, "stat.sock"), MetricsHub()
    await hub.serve(path)
    serve_metrics(config.host, config.metrics_port, hub.read, certificates.metrics)
    return Path(path)


def _socket_path(folder: Path, name: str) -> str:
    path = str(folder / name)
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        raise StartupError(f"{path} is too long for a Unix socket: set TMPDIR to a shorter folder")
    if "," in path:
        raise StartupError(f"{path} has a comma, which gRPC does not take: set TMPDIR to another folder")
    return path


def _watchdogs(
    config: SchedulerConfig, family: Supervisor, socket_path: str, frontends: Sequence[FrontendConfig]
) -> Iterator[Coroutine[None, None, None]]:
    core_timeout = min(config.step_timeout, config.peer_timeout) if config.peers else config.step_timeout
    yield watch_core(socket_path, core_timeout, partial(_kill, family, "core"))
    for number, frontend in enumerate(frontends):
        yield watch_frontend(_health_of(frontend), config.step_timeout, partial(_kill, family, f"frontend-{number}"))


def _kill(family: Supervisor, name: str) -> None:
    family.children[name].kill()


def _health_of(frontend: FrontendConfig) -> str:
    assert frontend.health_socket is not None, "the parent made it"
    return unix_endpoint(frontend.health_socket)


def _frontend(
    config: SchedulerConfig, core_socket: Path, metrics_socket: Path | None, health_socket: Path
) -> FrontendConfig:
    return FrontendConfig(
        model=config.model,
        core_socket=core_socket,
        host=config.host,
        port=config.port,
        health_port=config.health_port,
        health_socket=health_socket,
        tls_cert=config.tls_cert,
        tls_key=config.tls_key,
        tls_client_ca=config.tls_client_ca,
        token_file=config.token_file,
        model_name=config.model_name,
        use_generation_config=config.generation_config,
        grammar_timeout=config.grammar_timeout,
        core_timeout=config.worker_loss_timeout,
        hands_off=config.drain == HANDOFF,
        drain_timeout=config.drain_timeout,
        fair_by=config.fair_by,
        read_timeout=config.read_timeout,
        metrics_socket=metrics_socket,
        otlp_endpoint=config.otlp_endpoint,
    )


async def _until_ready(frontends: Iterable[FrontendConfig]) -> None:
    for frontend in frontends:
        await until_serving(_health_of(frontend), "readiness")
