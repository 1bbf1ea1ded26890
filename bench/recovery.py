"""What a fault costs where nobody stands in: `python -m bench.recovery [--json FILE]`.

A service with one worker of several ranks, in float64, and streams through Tandem's client; each fault happens in their
midst. Told of each: when clients could see it (health service tandem.Active), the longest pause of a stream, requests
that were lost, tokens that differ from the undisturbed run's.
"""

import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import psutil
import typer
import uvloop
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from rich.table import Table

from shared.errors import TandemError
from shared.ports import find_free
from shared.process import spawn, stop
from shared.rpc import until_serving
from tandem.async_client import AsyncClient

ROLES = {"rank": "worker_svc.main", "worker": "tandem worker", "core": "scheduler_svc.core_process"}
"""What the command line of each process holds."""
FAULTS = (
    ("rank", signal.SIGKILL),
    ("rank", signal.SIGSTOP),
    ("worker", signal.SIGKILL),
    ("core", signal.SIGKILL),
    ("core", signal.SIGSTOP),
)
TOKENS_BEFORE = 10
"""That each stream has when the fault happens."""


@dataclass(frozen=True, slots=True)
class Point:
    """One fault."""

    process: str
    signal: str
    streams: int
    noticed_s: float
    """When tandem.Active said NOT_SERVING."""
    serving_s: float
    """When it said SERVING again."""
    longest_pause_s: float
    requests_lost: int
    tokens_wrong: int


@dataclass(slots=True)
class Stream:
    """What one client got."""

    token_ids: list[int] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """It has the tokens that a fault waits for."""
    pause_s: float = 0.0
    is_lost: bool = False


def main(
    streams: Annotated[int, typer.Option(help="client streams")] = 16,
    tokens: Annotated[int, typer.Option(help="output tokens of each")] = 200,
    ranks: Annotated[int, typer.Option(help="ranks of the worker")] = 2,
    step_timeout: Annotated[float, typer.Option(help="--step-timeout of the service, seconds")] = 10.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the points here")] = None,
) -> None:
    """Prints a table, a row for each fault."""
    points = uvloop.run(measure(streams, tokens, ranks, step_timeout))
    table = Table(title=f"Faults amid {streams} streams, --step-timeout {step_timeout:g}")
    for name in Point.__dataclass_fields__:
        table.add_column(name.replace("_", " "), justify="right")
    for point in points:
        table.add_row(*map(str, asdict(point).values()))
    Console(width=130).print(table)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(point) for point in points], indent=2) + "\n", encoding="utf-8")


async def measure(streams: int, tokens: int, ranks: int, step_timeout: float) -> list[Point]:
    """All faults, one after another, on one service."""
    port = find_free("127.0.0.1")
    endpoint = f"127.0.0.1:{port}"
    options = {"dtype": "float64", "tensor-parallel": ranks, "kv-cache-memory": 64, "step-timeout": step_timeout}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    with tempfile.TemporaryDirectory() as scratch:
        quiet = {"TMPDIR": scratch, "TANDEM_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
        service = spawn("tandem", ["serve", "--port", str(port), *arguments], quiet, quiet=True)
        try:
            await until_serving(endpoint, "tandem.Active")
            async with AsyncClient(endpoint) as client:
                expected = await _read_all(client, streams, tokens, _nothing)
                return [
                    await _fault(client, service.pid, endpoint, role, number, expected, tokens)
                    for role, number in FAULTS
                ]
        finally:
            await stop([service], 20.0)


async def _fault(
    client: AsyncClient,
    parent: int,
    endpoint: str,
    role: str,
    number: signal.Signals,
    expected: list[Stream],
    tokens: int,
) -> Point:
    victim = _process(parent, role)
    seen = asyncio.create_task(_watch(endpoint))
    happened: list[float] = []

    def happen() -> None:
        happened.append(time.monotonic())
        victim.send_signal(number)

    got = await _read_all(client, len(expected), tokens, happen)
    await until_serving(endpoint, "tandem.Active")
    noticed, serving = await seen
    with suppress(psutil.NoSuchProcess):
        victim.resume()
    return Point(
        process=role,
        signal=number.name,
        streams=len(got),
        noticed_s=round(noticed - happened[0], 2),
        serving_s=round(serving - happened[0], 2),
        longest_pause_s=round(max(stream.pause_s for stream in got), 2),
        requests_lost=sum(stream.is_lost for stream in got),
        tokens_wrong=sum(
            ours != theirs
            for stream, other in zip(got, expected, strict=True)
            for ours, theirs in zip(stream.token_ids, other.token_ids, strict=False)
        ),
    )


def _nothing() -> None:
    """No fault."""


def _process(parent: int, role: str) -> psutil.Process:
    """The last one started of its role: of ranks one that no call reaches."""
    children = psutil.Process(parent).children(recursive=True)
    found = [child for child in children if ROLES[role] in " ".join(child.cmdline())]
    return max(found, key=lambda child: child.pid)


async def _watch(endpoint: str) -> tuple[float, float]:
    """When it ceased to serve and when it served again."""
    ceased = None
    async with aio.insecure_channel(endpoint) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        async for answer in stub.Watch(health_pb2.HealthCheckRequest(service="tandem.Active")):
            is_serving = answer.status == health_pb2.HealthCheckResponse.SERVING
            if ceased is None and not is_serving:
                ceased = time.monotonic()
            elif ceased is not None and is_serving:
                return ceased, time.monotonic()
    sys.exit("the frontend ended")


async def _read_all(client: AsyncClient, streams: int, tokens: int, fault: Callable[[], None]) -> list[Stream]:
    """All streams, with the fault in their midst."""
    got = [Stream() for _ in range(streams)]
    reading = [asyncio.create_task(_read(client, number, tokens, stream)) for number, stream in enumerate(got)]
    for stream in got:
        await stream.begun.wait()
    fault()
    await asyncio.gather(*reading)
    return got


async def _read(client: AsyncClient, number: int, tokens: int, stream: Stream) -> None:
    options = {"max_tokens": tokens, "seed": number, "temperature": number % 2, "ignore_eos": True}
    previous = time.monotonic()
    try:
        async for delta in client.generate("It is a truth" + " and" * number, **options):  # type: ignore[arg-type]
            now = time.monotonic()
            stream.pause_s, previous = max(stream.pause_s, now - previous), now
            stream.token_ids += delta.token_ids
            if len(stream.token_ids) >= TOKENS_BEFORE:
                stream.begun.set()
    except TandemError:
        stream.is_lost = True
    stream.is_lost |= len(stream.token_ids) != tokens


if __name__ == "__main__":
    typer.run(main)
