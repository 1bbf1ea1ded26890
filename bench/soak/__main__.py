"""Soaks a service: `python -m bench.soak [--seconds 1800] [--json FILE] [--plot FILE]`.

A scheduler and workers of the tiny model in float64, behind links that this process holds; clients that ask for mixed
work and compare every token with the undisturbed run; faults from a seeded schedule all the while. At the end every
request has ended once, nothing is held, no memory has grown and nothing is left of any process. Exit status 1 if not.
"""

import asyncio
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import psutil
import typer

from bench.soak.clients import Clients, Tally
from bench.soak.faults import Fault, Struck, schedule, strike
from bench.soak.memory import Memory
from bench.soak.progress import Progress
from bench.soak.report import Report, show, write
from bench.soak.service import Service
from shared.errors import TandemError
from tandem import AsyncClient

SAMPLE_S = 2.0
RESUME_S = 120.0
IDLE_S = 60.0
"""That everything may take to be free again after the last request."""


class Soak:
    """One run."""

    def __init__(self, service: Service, clients: Clients, client: AsyncClient, report: Report, stopped_s: float):
        self._service = service
        self._clients = clients
        self._client = client
        self._report = report
        self._stopped_s = stopped_s
        self._memory = Memory()
        self._striking: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """All but the end of the service."""
        await self._clients.learn()
        asking = asyncio.create_task(self._clients.run())
        beside = [asyncio.create_task(each) for each in (self._count(), self._sample(), Progress(self._report).run())]
        try:
            began = time.monotonic()
            for fault in schedule(self._report.seed, self._report.seconds, self._report.every):
                await asyncio.sleep(began + fault.at_s - time.monotonic())
                self._begin(fault)
            await asyncio.sleep(began + self._report.seconds - time.monotonic())
            await asyncio.gather(*self._striking)
            self._clients.stop()
            await asking
        finally:
            for task in (asking, *beside, *self._striking):
                task.cancel()
        self._report.left += await self._idle()
        self._report.growths = self._memory.growths()
        self._report.restarts = {f"{pod.name} {n}": pod.starts - 1 for n, pod in enumerate(self._service.pods)}

    def _begin(self, fault: Fault) -> None:
        task = asyncio.create_task(self._strike(fault))
        self._striking.add(task)
        task.add_done_callback(self._striking.discard)

    async def _strike(self, fault: Fault) -> None:
        victim = await strike(self._service, fault, self._stopped_s)
        if victim is not None:
            self._report.faults.append(Struck(fault.at_s, fault.name, victim))

    async def _count(self) -> None:
        before = 0
        while True:
            await asyncio.sleep(1.0)
            now = self._clients.tally.ended
            self._report.ended_per_second.append(now - before)
            before = now

    async def _sample(self) -> None:
        own = ("clients", psutil.Process())
        while True:
            self._memory.sample((*self._service.everyone(), own))
            await asyncio.sleep(SAMPLE_S)

    async def _idle(self) -> list[str]:
        """Waits until nothing is queued or running and all blocks are free; what is not, in the end."""
        deadline, problem = time.monotonic() + IDLE_S, "nothing answers"
        while time.monotonic() < deadline:
            with suppress(TandemError):
                stats = await self._client.stats()
                load, workers = stats.load, stats.load.workers
                held = sum(worker.total_blocks - worker.free_blocks for worker in workers)
                if load.queued == load.running == held == 0 and all(worker.connected for worker in workers):
                    self._report.replays, self._report.preemptions = stats.replays, stats.preemptions
                    return []
                problem = f"still held: {load}"
            await asyncio.sleep(0.2)
        return [problem]


async def soak(folder: Path, report: Report, pause: float, schedulers: int, workers: int, step_timeout: float) -> None:
    """Fills the report."""
    service = Service(folder, schedulers, workers, step_timeout)
    try:
        print("starts a service, then takes the undisturbed run", file=sys.stderr, flush=True)
        await service.start()
        async with AsyncClient(service.endpoints, connections=4, resume_timeout=RESUME_S, timeout=10.0) as client:
            clients = Clients(client, report.seed, report.clients, pause)
            report.tally = clients.tally
            await Soak(service, clients, client, report, 1.5 * step_timeout).run()
        report.left += await service.stop()
    finally:
        service.kill()


def main(
    seconds: Annotated[float, typer.Option(help="that faults happen")] = 180.0,
    seed: Annotated[int, typer.Option(help="of the faults and of the work")] = 1,
    every: Annotated[
        float, typer.Option(help="seconds from one fault to the next, half to one and a half of it")
    ] = 3.0,
    clients: Annotated[int, typer.Option(help="that ask at the same time")] = 16,
    pause: Annotated[float, typer.Option(help="seconds of a client between two requests")] = 0.0,
    schedulers: Annotated[int, typer.Option(help="one serves, the others stand by")] = 1,
    workers: Annotated[int, typer.Option(help="groups; the first one has two ranks")] = 2,
    step_timeout: Annotated[float, typer.Option(help="as of tandem scheduler and tandem worker")] = 2.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write all that was seen here")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw throughput and faults here")] = None,
) -> None:
    """Tells on standard error how far it is; prints a table at the end."""
    report = Report(seed, seconds, every, clients, Tally())
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(soak(Path(folder), report, pause, schedulers, workers, step_timeout))
        problems = report.problems()
        if problems:
            for log in Path(folder).glob("*.log"):
                print(f"{log.name}:", *log.read_text(errors="replace").splitlines()[-40:], sep="\n  ", file=sys.stderr)
    show(report)
    write(report, json_file, plot)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    typer.run(main)
