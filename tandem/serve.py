"""`tandem serve`: one scheduler and its workers on this machine, each a process of its own, kept running.

The children are the commands that an operator would run separately: `tandem scheduler` and `tandem worker`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, fields

from shared.ports import LOOPBACK, address, find_free, require_free
from shared.process import STARTUP_FAILED, Supervisor, stop_signals
from shared.rpc import until_serving
from shared.security import ServerSecurity, check_server
from shared.settings import check_bounds, check_distinct, flag

WORKER_GRACE_S = 5.0


_WHOLE = ("--nnodes", "1", "--node-rank", "0")  # whatever a LeaderWorkerSet tells this process


@dataclass(frozen=True, slots=True)
class ServeConfig(ServerSecurity):
    """What `tandem serve` itself decides; everything else it hands on."""

    workers: int = 1
    """Worker groups."""
    host: str = "127.0.0.1"
    """Address of the public port. Workers listen on 127.0.0.1: only the scheduler may reach them."""
    port: int = 50051
    """Port that clients reach."""
    health_port: int | None = None
    """Port with nothing but the health service, in plain text, for probes that speak no TLS; None: there is none, or
    with TLS any free one."""
    metrics_port: int | None = None
    """Port of the scheduler's Prometheus metrics over HTTP; those of the workers have the ports after it, in order.
    None: there are none."""
    drain_timeout: float = 10.0
    """Seconds that running streams have to finish after Ctrl-C or SIGTERM."""

    def __post_init__(self) -> None:
        """Raises StartupError for a value out of range."""
        check_bounds(self, ("workers",), 1)
        check_bounds(self, ("port", "health_port"), 1, 65535)
        check_bounds(self, ("metrics_port",), 1, 65535 - self.workers)
        check_bounds(self, ("drain_timeout",), 0)
        check_distinct(self.ports)
        check_server(self)

    @property
    def ports(self) -> dict[str, int | None]:
        """All that are listened on, but for those that nobody chose, by flag."""
        ports = {"--port": self.port, "--health-port": self.health_port, "--metrics-port": self.metrics_port}
        if self.metrics_port is None:
            return ports
        of_workers = {f"--metrics-port of worker {n}": self.metrics_port + 1 + n for n in range(self.workers)}
        return ports | of_workers


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
        self.endpoint = address(config.host, config.port)
        health_port = config.health_port
        if health_port is None and config.tls_cert is not None:
            health_port = find_free(config.host)
        self._health = self.endpoint if health_port is None else address(config.host, health_port)
        ports = [find_free(LOOPBACK) for _ in range(config.workers)]
        self._workers = [address(LOOPBACK, port) for port in ports]
        for number, port in enumerate(ports):
            own = _common(model, LOOPBACK, port, WORKER_GRACE_S - 1.0) + self._metrics(1 + number)
            arguments = ["worker", *_WHOLE, *own, *worker_arguments]
            self.family.start(f"worker-{number}", "tandem", arguments, quiet=True)
        own = _common(model, config.host, config.port, config.drain_timeout) + self._metrics(0)
        own += _security(config) + ([] if health_port is None else ["--health-port", str(health_port)])
        arguments = ["scheduler", *own, "--workers", ",".join(self._workers), *scheduler_arguments]
        self.family.start("scheduler", "tandem", arguments, quiet=True)

    def _metrics(self, number: int) -> list[str]:
        port = self.config.metrics_port
        return [] if port is None else ["--metrics-port", str(port + number)]

    async def ready(self) -> None:
        """Waits until requests are served."""
        for endpoint in self._workers:
            await until_serving(endpoint, "readiness")
        await until_serving(self._health, "tandem.Active")

    async def stop(self, hurry: asyncio.Event) -> None:
        """Streams end when the scheduler has drained them, so the workers go last. `hurry` ends the wait."""
        await self.family.stop(["scheduler"], self.config.drain_timeout + 3.0, hurry)
        workers = [name for name in self.family.children if name.startswith("worker-")]
        await self.family.stop(workers, WORKER_GRACE_S, hurry)


async def run(
    config: ServeConfig, model: str, scheduler_arguments: Sequence[str], worker_arguments: Sequence[str]
) -> int:
    """Serves until SIGINT or SIGTERM; the exit status. Prints one line when ready."""
    groups = "1 worker" if config.workers == 1 else f"{config.workers} workers"
    with stop_signals() as stopped:
        service = Service(config, model, scheduler_arguments, worker_arguments)
        announcement = f"tandem ready on {service.endpoint} (model {model}, {groups})"
        failed = await service.family.run(stopped, service.ready(), announcement)
        await service.stop(stopped)
        return STARTUP_FAILED if failed else 0


def _common(model: str, host: str, port: int, drain_timeout: float) -> list[str]:
    return ["--model", model, "--host", host, "--port", str(port), "--drain-timeout", str(drain_timeout)]


def _security(config: ServerSecurity) -> list[str]:
    given = {field.name: getattr(config, field.name) for field in fields(ServerSecurity)}
    return [word for name, value in given.items() if value is not None for word in (flag(name), str(value))]
