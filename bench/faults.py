"""What the loss of a worker costs those who read: `python -m bench.faults [--streams 16]`.

Two workers and a scheduler on this machine, in processes of their own; streams run on both. One worker is told to
stop, killed or stopped: how long until the scheduler says so, and the longest pause between two messages of a stream
that met it.
"""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.table import Table

from shared.ports import address, find_free
from shared.rpc import until_serving
from tandem import AsyncClient, WorkerLoad

HOST = "127.0.0.1"
FAULTS = (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP)
POLL_S = 0.01
WARM_MESSAGES = 20


@contextmanager
def service(model: str, step_timeout: float) -> Iterator[tuple[str, subprocess.Popen[bytes], str]]:
    """The scheduler's endpoint, the worker that is to fail, and that one's endpoint."""
    ports = [find_free(HOST) for _ in range(3)]
    endpoint, *workers = [address(HOST, port) for port in ports]
    started = [start("worker", model, port, "--kv-cache-memory", "128") for port in ports[1:]]
    options = ["--workers", ",".join(workers), "--step-timeout", str(step_timeout)]
    started.append(start("scheduler", model, ports[0], *options))
    try:
        asyncio.run(_until_ready(endpoint))
        yield endpoint, started[0], workers[0]
    finally:
        end(started)


def end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kills them, with their children."""
    everyone = [child for process in started for child in family(process)]
    for process in everyone:
        process.kill()
    psutil.wait_procs(everyone)


def start(command: str, model: str, port: int, *options: str) -> subprocess.Popen[bytes]:
    """`tandem COMMAND` on a port."""
    words = [sys.executable, "-m", "tandem", command, "--model", model, "--port", str(port), *options]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """It and its children; none where it has ended."""
    try:
        parent = psutil.Process(process.pid)
        return [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return []


async def _until_ready(endpoint: str) -> None:
    await until_serving(endpoint, "tandem.Active")
    async with AsyncClient(endpoint) as client:
        await until(client, lambda workers: all(worker.connected for worker in workers))


async def measure(
    endpoint: str, worker: subprocess.Popen[bytes], address: str, fault: int, streams: int
) -> list[float]:
    """As disturb, of a fault of a worker, which is noticed when the scheduler says so."""

    def fail() -> None:
        for process in family(worker) if fault == signal.SIGSTOP else [psutil.Process(worker.pid)]:
            process.send_signal(fault)

    async def noticed(client: AsyncClient) -> None:
        await until(client, lambda workers: any(_is_leaving(worker, address) for worker in workers))

    return await disturb([endpoint], streams, fail, noticed)


async def disturb(
    endpoints: Sequence[str],
    streams: int,
    fail: Callable[[], None],
    noticed: Callable[[AsyncClient], Awaitable[None]],
) -> list[float]:
    """Fails in the midst of streams. Seconds until it was noticed; of the median pause between two messages before it;
    of the longest one that met it."""
    async with AsyncClient(endpoints, connections=4) as client:
        times: list[list[float]] = [[] for _ in range(streams)]
        reading = [asyncio.create_task(_read(client, number, at)) for number, at in enumerate(times)]
        await until(client, lambda _: min(map(len, times)) >= WARM_MESSAGES)
        began = time.perf_counter()
        fail()
        await noticed(client)
        over = time.perf_counter()
        await asyncio.gather(*reading)
    pauses = [pair for at in times for pair in pairwise(at)]
    usual = median(end - start for start, end in pauses if end < began)
    return [over - began, usual, max(end - start for start, end in pauses if start < over and end > began)]


async def _read(client: AsyncClient, number: int, at: list[float]) -> None:
    """A stream; `at`: when its messages came."""
    stream = client.generate("It is a truth", max_tokens=400, ignore_eos=True, seed=number)
    async for _ in stream:
        at.append(time.perf_counter())


def _is_leaving(worker: WorkerLoad, address: str) -> bool:
    return worker.endpoint == address and (worker.draining or not worker.connected)


async def until(client: AsyncClient, condition: Callable[[tuple[WorkerLoad, ...]], bool]) -> None:
    """Asks the scheduler until the condition holds of what it says of its workers."""
    while True:
        if condition((await client.load()).workers):
            return
        await asyncio.sleep(POLL_S)


def main(
    model: Annotated[str, typer.Option(help="model folder, tiny or tiny-moe")] = "tiny",
    streams: Annotated[int, typer.Option(help="streams that run meanwhile")] = 16,
    step_timeout: Annotated[float, typer.Option(help="as of tandem scheduler")] = 2.0,
) -> None:
    """Prints a table."""
    table = Table(title=f"{model}: {streams} streams on two workers, --step-timeout {step_timeout:g}")
    table.add_column("fault of a worker")
    for name in ("noticed in", "usual pause", "longest pause that met it"):
        table.add_column(name, justify="right")
    for fault in FAULTS:
        with service(model, step_timeout) as (endpoint, worker, address):
            seconds = asyncio.run(measure(endpoint, worker, address, fault, streams))
        table.add_row(fault.name, *(f"{value * 1000:,.0f} ms" for value in seconds))
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
