"""The scheduler's parent process: starts the core and the frontends, keeps them running, stops them in order.

Serves nothing itself. The core listens on a Unix socket in a private folder; frontends share the public port.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import Iterable
from pathlib import Path

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.frontend.config import FrontendConfig
from shared.model_config import load_model_config
from shared.ports import find_free, require_free
from shared.process import Supervisor, stop_signals
from shared.settings import to_json

POLL_S = 0.05


async def run(config: SchedulerConfig) -> int:
    """Serves until SIGINT or SIGTERM; the exit status. Prints one line when ready.

    Raises StartupError for a bad model folder or a busy port.
    """
    name = load_model_config(config.model, config.model_name).name
    require_free(config.host, config.port)
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder, stop_signals() as stopped:
        family = Supervisor()
        socket_path = str(Path(folder) / "core.sock")
        family.start("core", "scheduler_svc.core_process", ["--config", to_json(config), "--socket", socket_path])
        frontends = [_frontend(config, socket_path) for _ in range(config.frontends)]
        for number, frontend in enumerate(frontends):
            family.start(f"frontend-{number}", "scheduler_svc.frontend.main", ["--config", to_json(frontend)])
        ready = asyncio.create_task(_until_ready(f"{config.host}:{frontend.own_port}" for frontend in frontends))
        ready.add_done_callback(lambda task: task.cancelled() or _announce(config, name))
        ends = [asyncio.create_task(event.wait()) for event in (stopped, family.failed)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in (ready, *ends):
            task.cancel()
        await family.stop((key for key in family.children if key != "core"), config.drain_timeout + 1.0)
        await family.stop(["core"], 1.0)
        return 1 if family.failed.is_set() else 0


def _frontend(config: SchedulerConfig, socket_path: str) -> FrontendConfig:
    return FrontendConfig(
        model=config.model,
        core_socket=Path(socket_path),
        host=config.host,
        port=config.port,
        own_port=find_free(config.host),
        model_name=config.model_name,
        use_generation_config=config.generation_config,
        core_timeout=config.worker_loss_timeout,
        drain_timeout=config.drain_timeout,
    )


def _announce(config: SchedulerConfig, name: str) -> None:
    print(f"tandem scheduler ready on {config.host}:{config.port} (model {name})", flush=True)


async def _until_ready(endpoints: Iterable[str]) -> None:
    for endpoint in endpoints:
        await until_serving(endpoint, "readiness")


async def until_serving(endpoint: str, service: str) -> None:
    """Waits until the server at `endpoint` reports the health service as SERVING."""
    async with aio.insecure_channel(endpoint, options=[("grpc.max_reconnect_backoff_ms", 200)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            with contextlib.suppress(aio.AioRpcError):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=1.0)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            await asyncio.sleep(POLL_S)
