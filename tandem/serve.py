"""`tandem serve`: one scheduler and its workers on this machine, each a process of its own, kept running.

The children are the commands that an operator would run separately: `tandem scheduler` and `tandem worker`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from shared.ports import find_free, require_free
from shared.process import STARTUP_FAILED, Supervisor, stop_signals
from shared.rpc import until_serving

WORKER_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What `tandem serve` itself decides; everything else it hands on."""

    workers: int = 1
    """Worker groups."""
    host: str = "127.0.0.1"
    """Address of the public port; workers listen on it too."""
    port: int = 50051
    """Port that clients reach."""
    drain_timeout: float = 10.0
    """Seconds that running streams have to finish after Ctrl-C or SIGTERM."""


class Service:
    """A scheduler and its workers, running. Start inside an event loop."""

    def __init__(
        self,
        config: ServeConfig,
        model: str,
        scheduler_arguments: Sequence[str] = (),
        worker_arguments: Sequence[str] = (),
    ) -> None:
        """The arguments are further ones of `tandem scheduler` and `tandem worker`. StartupError for a busy port."""
        require_free(config.host, config.port)
        self.config = config
        self.family = Supervisor()
        self._endpoints = [f"{config.host}:{find_free(config.host)}" for _ in range(config.workers)]
        for number, endpoint in enumerate(self._endpoints):
            address = _address(model, endpoint, WORKER_GRACE_S - 1.0)
            self.family.start(f"worker-{number}", "tandem", ["worker", *address, *worker_arguments], quiet=True)
        address = _address(model, f"{config.host}:{config.port}", config.drain_timeout)
        arguments = ["scheduler", *address, "--workers", ",".join(self._endpoints), *scheduler_arguments]
        self.family.start("scheduler", "tandem", arguments, quiet=True)

    async def ready(self) -> None:
        """Waits until requests are served."""
        for endpoint in self._endpoints:
            await until_serving(endpoint, "readiness")
        await until_serving(f"{self.config.host}:{self.config.port}", "tandem.Active")

    async def stop(self, hurry: asyncio.Event) -> None:
        """Streams end when the scheduler has drained them, so the workers go last. `hurry` ends the wait."""
        await self.family.stop(["scheduler"], self.config.drain_timeout + 3.0, hurry)
        workers = [name for name in self.family.children if name != "scheduler"]
        await self.family.stop(workers, WORKER_GRACE_S, hurry)


async def run(
    config: ServeConfig, model: str, scheduler_arguments: Sequence[str], worker_arguments: Sequence[str]
) -> int:
    """Serves until SIGINT or SIGTERM; the exit status. Prints one line when ready."""
    groups = "1 worker" if config.workers == 1 else f"{config.workers} workers"
    announcement = f"tandem ready on {config.host}:{config.port} (model {model}, {groups})"
    with stop_signals() as stopped:
        service = Service(config, model, scheduler_arguments, worker_arguments)
        failed = await service.family.run(stopped, service.ready(), announcement)
        await service.stop(stopped)
        return STARTUP_FAILED if failed else 0


def _address(model: str, endpoint: str, drain_timeout: float) -> list[str]:
    host, _, port = endpoint.rpartition(":")
    return ["--model", model, "--host", host, "--port", port, "--drain-timeout", str(drain_timeout)]
