"""What the loss of the active scheduler costs those who read: `python -m bench.failover [--streams 16]`.

Two schedulers and a worker on this machine, in processes of their own; streams run. The active scheduler is told to
stop (and hands off), killed or stopped, all processes of it: how long until the other one says that it serves, and the
longest pause between two messages of a stream that met it.
"""

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.faults import FAULTS, HOST, disturb, end, family, start
from shared.ports import address, find_free
from shared.rpc import until_serving
from tandem import AsyncClient


@contextmanager
def service(model: str) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Both schedulers by their endpoints, the active one first."""
    ports = [find_free(HOST) for _ in range(3)]
    *endpoints, worker = [address(HOST, port) for port in ports]
    started = [start("worker", model, ports[2], "--kv-cache-memory", "128")]
    options = ["--workers", worker, "--peers", ",".join(endpoints), "--drain", "handoff"]
    schedulers = {}
    for port, endpoint in zip(ports, endpoints, strict=False):
        schedulers[endpoint] = start("scheduler", model, port, *options)
        asyncio.run(until_serving(endpoint, "readiness"))
    started += schedulers.values()
    try:
        asyncio.run(until_serving(endpoints[0], "tandem.Active"))
        yield schedulers
    finally:
        end(started)


async def measure(schedulers: dict[str, subprocess.Popen[bytes]], fault: int, streams: int) -> list[float]:
    """As bench.faults.disturb, of a fault of the active one, which is over when the other one serves."""
    endpoints = list(schedulers)
    active = schedulers[endpoints[0]]

    def fail() -> None:
        for process in [active] if fault == signal.SIGTERM else family(active):
            process.send_signal(fault)

    async def served(_: AsyncClient) -> None:
        await until_serving(endpoints[1], "tandem.Active")

    return await disturb(endpoints, streams, fail, served)


def main(
    model: Annotated[str, typer.Option(help="model folder, tiny or tiny-moe")] = "tiny",
    streams: Annotated[int, typer.Option(help="streams that run meanwhile")] = 16,
) -> None:
    """Prints a table."""
    table = Table(title=f"{model}: {streams} streams, a scheduler and its standby")
    table.add_column("the active scheduler gets")
    for name in ("served again after", "usual pause", "longest pause that met it"):
        table.add_column(name, justify="right")
    for fault in FAULTS:
        with service(model) as schedulers:
            seconds = asyncio.run(measure(schedulers, fault, streams))
        table.add_row(fault.name, *(f"{value * 1000:,.0f} ms" for value in seconds))
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
