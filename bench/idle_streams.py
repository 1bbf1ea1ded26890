"""What idle streams cost: `python -m bench.idle_streams [--streams 5000] [--connections 8]`.

A service of its own whose worker is stopped, so that every stream waits: memory of frontend and core for each, and the
processor time that all of them take while nothing happens. Then the worker goes on and every stream must end well.
"""

import asyncio
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Annotated

import psutil
import typer
import uvloop
from grpc import aio
from rich.console import Console
from rich.table import Table

from shared.pb import generation_pb2 as pb
from shared.pb import generation_pb2_grpc as rpc
from shared.ports import find_free
from shared.process import raise_file_limit, spawn, stop
from shared.rpc import make_channel, until_serving

ROLES = {"frontend": "scheduler_svc.frontend.main", "core": "scheduler_svc.core_process"}
IDLE_S = 5.0
LONGEST_S = 600.0
"""No timeout of the service may end what waits here."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one process."""

    process: str
    before_mib: float
    with_streams_mib: float
    kib_per_stream: float
    idle_cpu_percent: float
    """Of one core, all streams together."""


def main(
    streams: Annotated[int, typer.Option(help="streams that wait")] = 5000,
    connections: Annotated[int, typer.Option(help="connections that carry them")] = 8,
) -> None:
    """Prints a table."""
    raise_file_limit()
    costs, seconds = uvloop.run(measure(streams, connections))
    table = Table(title=f"{streams} idle streams over {connections} connections; opened in {seconds:.1f} s")
    for name in Cost.__dataclass_fields__:
        table.add_column(name.replace("_", " "), justify="right")
    for cost in costs:
        table.add_row(*(f"{value:,}" if isinstance(value, float) else value for value in asdict(cost).values()))
    Console(width=110).print(table)


async def measure(streams: int, connections: int) -> tuple[list[Cost], float]:
    """What each process costs, and how long the streams took to open."""
    port = find_free("127.0.0.1")
    options = {"step-timeout": LONGEST_S, "worker-loss-timeout": LONGEST_S, "max-queue": streams, "kv-cache-memory": 64}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    with tempfile.TemporaryDirectory() as scratch:
        quiet = {"TMPDIR": scratch, "TANDEM_LOG_LEVEL": "ERROR"}
        service = spawn(
            "tandem", ["serve", "--port", str(port), "--lease-timeout", str(LONGEST_S), *arguments], quiet, quiet=True
        )
        try:
            await until_serving(f"127.0.0.1:{port}", "tandem.Active")
            return await _measure(service.pid, f"127.0.0.1:{port}", streams, connections)
        finally:
            await stop([service], 20.0)


async def _measure(parent: int, endpoint: str, streams: int, connections: int) -> tuple[list[Cost], float]:
    rank = _process(parent, "worker_svc.main")
    processes = {role: _process(parent, command) for role, command in ROLES.items()}
    before = {role: process.memory_info().rss for role, process in processes.items()}
    channels = [make_channel(endpoint) for _ in range(connections)]
    rank.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    reading = [asyncio.create_task(_read(channels[number % connections])) for number in range(streams)]
    while await _load(channels[0]) < streams:
        await asyncio.wait(reading, timeout=0.1)  # the service tells its load twice a second
        if any(stream.done() for stream in reading):
            sys.exit("a stream ended that should wait")
    opened = time.monotonic() - started
    costs = [await _cost(role, processes[role], before[role], streams) for role in ROLES]
    rank.send_signal(signal.SIGCONT)
    ends = await asyncio.gather(*reading)
    if sum(ends) != streams:
        sys.exit(f"{streams - sum(ends)} streams got no token")
    for channel in channels:
        await channel.close()
    return costs, opened


def _process(parent: int, command: str) -> psutil.Process:
    children = psutil.Process(parent).children(recursive=True)
    return next(child for child in children if command in " ".join(child.cmdline()))


async def _read(channel: aio.Channel) -> int:
    """The tokens of a stream of one."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), stopping=pb.StoppingParams(max_tokens=1))
    return sum([len(response.token_ids) async for response in rpc.GenerationServiceStub(channel).Generate(request)])


async def _load(channel: aio.Channel) -> int:
    load = await rpc.GenerationServiceStub(channel).GetLoad(pb.GetLoadRequest())
    return load.queued + load.running


async def _cost(role: str, process: psutil.Process, before: int, streams: int) -> Cost:
    rss, cpu = process.memory_info().rss, _cpu(process)
    await asyncio.sleep(IDLE_S)
    return Cost(
        process=role,
        before_mib=round(before / 2**20, 1),
        with_streams_mib=round(rss / 2**20, 1),
        kib_per_stream=round((rss - before) / 2**10 / streams, 1),
        idle_cpu_percent=round((_cpu(process) - cpu) / IDLE_S * 100, 1),
    )


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    typer.run(main)
