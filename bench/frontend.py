"""Streaming through frontend processes: `python -m bench.frontend [--json FILE]`.

Real frontends and real gRPC between a source of tokens in the core's place and client processes: messages a second,
gaps between the messages of a stream, and the processor time that frontends take for a message.
"""

import asyncio
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
import uvloop
from rich.console import Console
from rich.table import Table

from bench.token_source import TokenSource
from scheduler_svc.frontend.config import FrontendConfig
from shared.ports import find_free
from shared.process import exited, spawn, stop
from shared.rpc import until_serving
from shared.settings import to_json
from tandem.models import model_folder

NOT_MEASURED = (
    "Not measured: the scheduler and the model (the tokens are always the same word), tokenizing prompts, a network. "
    "Source, frontends and clients share this machine's cores: with few of them the clients are the bottleneck, "
    "and gaps are theirs as much as the frontends'. Processor time per message is the frontends' alone."
)


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement."""

    streams: int
    frontends: int
    steps_per_second: float
    """0: as fast as the frontends read."""
    tokens_per_second: float
    messages_per_second: float
    tokens_per_message: float
    gap_p50_ms: float
    gap_p99_ms: float
    cpu_us_per_message: float
    cpu_us_per_token: float


def main(
    streams: Annotated[list[int], typer.Option(help="client streams; repeat for several points")] = [64, 256, 1024],  # noqa: B006
    frontends: Annotated[int, typer.Option(help="frontend processes")] = 1,
    clients: Annotated[int, typer.Option(help="client processes")] = 1,
    rate: Annotated[float, typer.Option(help="steps a second of the paced points")] = 50.0,
    seconds: Annotated[float, typer.Option(help="duration of a point")] = 3.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the points here")] = None,
) -> None:
    """Prints a table; one paced and one unthrottled point for each number of streams."""
    points = [
        uvloop.run(measure(number, frontends, clients, pace, seconds)) for number in streams for pace in (rate, 0.0)
    ]
    _print(points)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(point) for point in points], indent=2) + "\n", encoding="utf-8")


async def measure(streams: int, frontends: int, clients: int, rate: float, seconds: float) -> Point:
    """One point, with processes of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = model_folder("tiny")
        source = TokenSource(WORD)
        listening = await source.serve(folder / "core")
        configs = [FrontendConfig(model, folder / "core", port=find_free("127.0.0.1")) for _ in range(frontends)]
        servers = [spawn("scheduler_svc.frontend.main", ["--config", to_json(c)], _QUIET) for c in configs]
        endpoints = [f"127.0.0.1:{config.port}" for config in configs]
        for endpoint in endpoints:
            await until_serving(endpoint, "readiness")
        shares = [streams // clients + (number < streams % clients) for number in range(clients)]
        outputs = [folder / f"client-{number}.npz" for number in range(clients)]
        readers = [
            spawn("bench.streaming_client", [str(share), str(output), *endpoints])
            for share, output in zip(shares, outputs, strict=True)
        ]
        await source.submitted(streams)
        cpu_before = sum(_cpu_seconds(server.pid) for server in servers)
        loop = asyncio.get_running_loop()
        started = loop.time()
        await source.run(seconds, rate)
        for reader in readers:
            if await exited(reader) != 0:
                sys.exit("a client failed: see its message above")
        elapsed = loop.time() - started
        cpu = sum(_cpu_seconds(server.pid) for server in servers) - cpu_before
        await stop(servers, 5.0)
        listening.close()
        return _point(streams, frontends, rate, elapsed, cpu, [np.load(output) for output in outputs])


WORD = 300
"""Any token of the tiny model that is no special one."""
_QUIET = {"TANDEM_LOG_LEVEL": "WARNING"}


def _cpu_seconds(pid: int) -> float:
    """User and system time that a process has used (proc(5), fields 14 and 15 of stat, in ticks of 10 ms)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def _point(
    streams: int, frontends: int, rate: float, elapsed: float, cpu: float, seen: list["np.lib.npyio.NpzFile"]
) -> Point:
    gaps = np.concatenate([file["gaps"] for file in seen])
    tokens = sum(int(file["tokens"]) for file in seen)
    messages = gaps.size + streams
    return Point(
        streams=streams,
        frontends=frontends,
        steps_per_second=rate,
        tokens_per_second=round(tokens / elapsed),
        messages_per_second=round(messages / elapsed),
        tokens_per_message=round(tokens / messages, 2),
        gap_p50_ms=round(float(np.percentile(gaps, 50)) * 1e3, 2),
        gap_p99_ms=round(float(np.percentile(gaps, 99)) * 1e3, 2),
        cpu_us_per_message=round(cpu / messages * 1e6, 1),
        cpu_us_per_token=round(cpu / tokens * 1e6, 1),
    )


def _print(points: list[Point]) -> None:
    table = Table(title="Streaming through frontends")
    for name in Point.__dataclass_fields__:
        table.add_column(name.replace("_", " "), justify="right")
    for point in points:
        table.add_row(*(f"{value:,}" for value in asdict(point).values()))
    console = Console(width=150)
    console.print(table)
    console.print(NOT_MEASURED)


if __name__ == "__main__":
    typer.run(main)
