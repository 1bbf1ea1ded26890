"""`tandem openai`: `tandem serve` with the inference gateway smg before it, which gives it OpenAI's HTTP API.

The gateway is a package of its own and a process here: `python -m tandem.gateway`. Knows its command line, and nothing
of how it works.
"""

import asyncio
import contextlib
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from shared.errors import StartupError
from shared.ports import LOOPBACK, address, find_free, require_free
from shared.process import STARTUP_FAILED, die_with_parent, stop_signals
from shared.settings import check_bounds, check_distinct
from tandem.serve import ServeConfig, Service

POLL_S = 0.2
ANSWER_TIMEOUT_S = 2.0
NOT_OFFERED = ("health_port", "tls_cert", "tls_key", "tls_client_ca", "token_file")
"""Flags of `tandem serve` that this command has not: the gateway talks to engines in plain text, and shows no token."""
GATEWAY_GRACE_S = 1.0
"""Of itself it would wait for some seconds for others to notice that it goes."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """What `tandem openai` decides beyond `tandem serve`. Raises StartupError for a value out of range."""

    http_host: str = "127.0.0.1"
    """Address of the HTTP port. The gateway asks nobody for a key unless --api-key is among its further options."""
    http_port: int = 8000
    """Port of OpenAI's HTTP API."""
    http_metrics_port: int | None = None
    """Port of the gateway's own Prometheus metrics on 127.0.0.1; None means any free one."""

    def __post_init__(self) -> None:
        check_bounds(self, ("http_port", "http_metrics_port"), 1, 65535)

    @property
    def url(self) -> str:
        """Where the HTTP API is."""
        return f"http://{address(self.http_host, self.http_port)}"


def require_installed() -> None:
    """Raises StartupError, saying what to do, where there is no gateway."""
    if find_spec("smg") is None:
        raise StartupError("the gateway is not installed: pip install 'tandem-serve[gateway]'")


async def run(
    gateway: GatewayConfig,
    further: Sequence[str],
    config: ServeConfig,
    model: str,
    scheduler_arguments: Sequence[str],
    worker_arguments: Sequence[str],
) -> int:
    """Serves until SIGINT or SIGTERM; the exit status. `further` are options of `smg launch`."""
    require_installed()
    own = {"--http-port": gateway.http_port, "--http-metrics-port": gateway.http_metrics_port}
    check_distinct({**own, **config.ports})
    require_free(gateway.http_host, gateway.http_port, "--http-host", "--http-port")
    if gateway.http_metrics_port:
        require_free(LOOPBACK, gateway.http_metrics_port, "--http-host", "--http-metrics-port")
    with stop_signals() as stopped:
        service = Service(config, model, scheduler_arguments, worker_arguments)
        arguments = [*_arguments(gateway, service), *further]
        service.family.start("gateway", "tandem.gateway", arguments, quiet=True)
        announcement = f"tandem ready on {gateway.url}/v1 (model {model}; gRPC on {service.endpoint})"
        failed = await service.family.run(stopped, _ready(gateway, service), announcement)
        await service.stop(stopped)  # ends the streams; the gateway has only to pass on what came last
        await service.family.stop(["gateway"], GATEWAY_GRACE_S, stopped)
        return STARTUP_FAILED if failed else 0


def _arguments(gateway: GatewayConfig, service: Service) -> list[str]:
    options = {
        "host": gateway.http_host,
        "port": gateway.http_port,
        "worker-urls": f"grpc://{service.endpoint}",
        "prometheus-host": LOOPBACK,
        "prometheus-port": gateway.http_metrics_port or find_free(LOOPBACK),
        "tool-call-parser": "qwen",
        "reasoning-parser": "qwen3",
        "worker-startup-check-interval": 1,
        "health-check-interval-secs": 5,
        # While a worker or the core is replaced no token comes, and nothing is lost; who asks meanwhile waits, as long
        # as --worker-loss-timeout has it. The gateway must not take that for the end.
        "worker-wedge-secs": 60,
        "health-failure-threshold": 12,
        "log-level": "warn",
    }
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


async def _ready(gateway: GatewayConfig, service: Service) -> None:
    await service.ready()
    while True:
        if await asyncio.to_thread(_answers, f"{gateway.url}/readiness"):
            return
        await asyncio.sleep(POLL_S)


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=ANSWER_TIMEOUT_S):
        return True
    return False


def main() -> int:
    """Is the gateway, which dies with the process that started this one; the exit status."""
    die_with_parent()
    from smg.cli import main as launch  # only this process needs it, and it may not be installed

    try:
        launch(["launch", *sys.argv[1:]])
    except SystemExit as end:  # it does not like its options, and has said why
        return STARTUP_FAILED if end.code else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
