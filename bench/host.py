"""What a decode step costs on the host: `python -m bench.host [--batch N] [--step-us US]`, on Linux.

Client, frontend, core and worker as processes, the worker without a device (bench.idle_worker) or, with --model, a real
one. Prints the period of a step and the CPU time that each thread spends on it.
"""

import os
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, TypeAlias

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from bench.services import services
from bench.work import MODEL_HELP, bench_model
from tandem.bench.measure import start_client
from tandem.bench.work import random_items

_ROLES = {
    "worker_svc.main": "worker",
    "bench.idle_worker": "worker",
    "core_process": "core",
    "frontend.main": "frontend",
    "tandem.bench.client": "client",
}
_START_S = 3.0
_SETTLE_S = 0.2
_SAMPLE_S = 0.05
_LEAST_US = 2.0

_Thread: TypeAlias = tuple[str, int]  # its process's role and its id
_Times: TypeAlias = dict[_Thread, float]  # CPU time so far, microseconds


def main(
    batch: Annotated[int, typer.Option(help="sequences that decode")] = 1,
    tokens: Annotated[int, typer.Option(help="tokens of each")] = 1500,
    step_us: Annotated[float, typer.Option(help="what a step takes on the device that is not there")] = 700.0,
    model: Annotated[str | None, typer.Option(help=f"a real worker: {MODEL_HELP}")] = None,
) -> None:
    """Prints a table."""
    idle = None if model else step_us
    with (
        bench_model(model or "tiny") as (folder, load_format),
        services(folder, load_format, 1, idle_step_us=idle) as endpoint,
    ):
        period_us, times = _measure(endpoint, batch, tokens)
    title = f"batch {batch}: {period_us:,.0f} us a step"
    _print(title if model else f"{title}, of which the device {step_us:,.0f}", times)


def _measure(endpoint: str, batch: int, tokens: int) -> tuple[float, _Times]:
    """Microseconds of a step, and of each thread's CPU time in it."""
    with TemporaryDirectory() as scratch:
        output, start_file, start = Path(scratch) / "streams.npz", Path(scratch) / "start", time.time() + _START_S
        start_file.write_text(str(start), encoding="utf-8")
        process = start_client(endpoint, start_file, output, random_items(batch, 16, tokens), batch)
        time.sleep(start + _SETTLE_S - time.time())
        began, before = time.time(), _cpu_times()
        ended, after = began, before
        while process.poll() is None:
            sample = _cpu_times()
            if any(role == "client" for role, _ in sample):
                ended, after = time.time(), sample
            time.sleep(_SAMPLE_S)
        streams = np.load(output)
    period_us = float(((streams["last"] - streams["first"]) / (tokens - 1)).mean() * 1e6)
    steps = (min(ended, float(streams["last"].max())) - began) * 1e6 / period_us
    return period_us, {thread: (us - before.get(thread, 0.0)) / steps for thread, us in after.items()}


def _cpu_times() -> _Times:
    times = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode()
            role = next((role for part, role in _ROLES.items() if part in command), None)
            for thread in (process / "task").iterdir() if role is not None else ():
                times[str(role), int(thread.name)] = int((thread / "schedstat").read_text().split()[0]) / 1e3
        except OSError:  # it has ended
            continue
    return times


def _print(title: str, times: _Times) -> None:
    table = Table(title=title)
    for name in ("process", "CPU us a step", "by thread, the main one first"):
        table.add_column(name, justify="right" if "us" in name else "left")
    threads: defaultdict[str, list[float]] = defaultdict(list)
    for (role, _), us in sorted(times.items()):
        threads[role].append(us)
    for role, spent in threads.items():
        busy = ", ".join(f"{us:.0f}" for us in spent if us >= _LEAST_US)
        table.add_row(role, f"{sum(spent):.0f}", busy)
    console = Console(width=110)
    console.print(table)
    console.print(f"{os.cpu_count()} cores. Spinning on a GPU's event counts as CPU time.")


if __name__ == "__main__":
    typer.run(main)
