"""`tandem serve`: one scheduler and its workers on this machine, each a process of its own, kept running.

The children are the commands that an operator would run separately: `tandem scheduler` and `tandem worker`.
"""

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


async def run(
    config: ServeConfig, model: str, scheduler_arguments: Sequence[str], worker_arguments: Sequence[str]
) -> int:
    """Serves until SIGINT or SIGTERM; the exit status. Prints one line when ready.

    The arguments are further ones of `tandem scheduler` and `tandem worker`. Raises StartupError for a busy port.
    """
    require_free(config.host, config.port)
    endpoints = [f"{config.host}:{find_free(config.host)}" for _ in range(config.workers)]
    with stop_signals() as stopped:
        family = Supervisor()
        for number, endpoint in enumerate(endpoints):
            address = _address(model, endpoint, WORKER_GRACE_S - 1.0)
            family.start(f"worker-{number}", "tandem", ["worker", *address, *worker_arguments], quiet=True)
        address = _address(model, f"{config.host}:{config.port}", config.drain_timeout)
        arguments = ["scheduler", *address, "--workers", ",".join(endpoints), *scheduler_arguments]
        family.start("scheduler", "tandem", arguments, quiet=True)
        failed = await family.run(stopped, _until_ready(config, model, endpoints))
        # Streams end when the scheduler has drained them, so the workers go last.
        await family.stop(["scheduler"], config.drain_timeout + 3.0, stopped)
        await family.stop((name for name in family.children if name != "scheduler"), WORKER_GRACE_S, stopped)
        return STARTUP_FAILED if failed else 0


def _address(model: str, endpoint: str, drain_timeout: float) -> list[str]:
    host, _, port = endpoint.rpartition(":")
    return ["--model", model, "--host", host, "--port", port, "--drain-timeout", str(drain_timeout)]


async def _until_ready(config: ServeConfig, model: str, endpoints: Sequence[str]) -> None:
    for endpoint in endpoints:
        await until_serving(endpoint, "readiness")
    await until_serving(f"{config.host}:{config.port}", "tandem.Active")
    groups = "1 worker" if config.workers == 1 else f"{config.workers} workers"
    print(f"tandem ready on {config.host}:{config.port} (model {model}, {groups})", flush=True)
