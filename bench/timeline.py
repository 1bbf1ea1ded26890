"""Where a decode step's time goes on the GPU: `python -m bench.timeline [--model NAME] [--batch N] [--json FILE]`.

The period from one step's first kernel to the next one's, the share of it in which the GPU works, and the time of each
kind of kernel, by torch's profiler. Kernels that start before the one ahead has ended count twice. The CPU time of a
step's parts is that of a second run without the profiler; core and worker are one process there.
"""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from bench.offline import Engine
from bench.work import CONTEXT, MODEL_HELP, SEQUENCES, bench_model
from tandem.bench.work import random_items
from worker_svc.config import WorkerConfig

_FIRST_KERNEL = "_decode_kernel"  # of every decode step: kernels.prepare
_SKIPPED = 8  # steps after the prompts
_CPU_STEPS = 256


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kind of kernel or copy in a step."""

    name: str
    calls: float
    us: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step of a batch, averages."""

    batch: int
    period_us: float
    busy_share: float
    between_us: float
    """From the end of a step's last kernel to the first of the next, those that send changes included."""
    kernels: list[Kernel]
    cpu_us: dict[str, float]
    """Thread time of each part of a step, prompts included."""


def main(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "qwen3-0.6b",
    batches: Annotated[str, typer.Option(help="batch sizes")] = "8,256",
    steps: Annotated[int, typer.Option(help="decode steps that are profiled")] = 32,
    most: Annotated[int, typer.Option(help="kernels shown")] = 14,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the timelines here")] = None,
) -> None:
    """Prints a table for each batch size."""
    with bench_model(model) as (folder, load_format):
        engine = Engine(
            WorkerConfig(
                str(folder),
                load_format=load_format,
                max_num_seqs=SEQUENCES,
                max_model_len=CONTEXT,
            )
        )
    timelines = [measure(engine, int(batch), steps) for batch in batches.split(",")]
    for timeline in timelines:
        _print(timeline, most)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(timeline) for timeline in timelines], indent=2), encoding="utf-8")


def measure(engine: Engine, batch: int, steps: int) -> Timeline:
    """Profiles `batch` sequences from their prompts on."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        engine.run(random_items(batch, 128, steps + _SKIPPED))
    events: list[Any] = [event for event in profiler.events() or [] if event.device_type.name == "CUDA"]
    events.sort(key=lambda event: event.time_range.start)
    starts = [event.time_range.start for event in events if event.name == _FIRST_KERNEL][_SKIPPED:]
    inside = [event for event in events if starts[0] <= event.time_range.start < starts[-1]]
    count, span = len(starts) - 1, starts[-1] - starts[0]
    calls = Counter(event.name for event in inside)
    times: Counter[str] = Counter()
    for event in inside:
        times[event.name] += event.time_range.end - event.time_range.start
    between = [_gap_before(events, start) for start in starts[1:]]
    kernels = [Kernel(name, calls[name] / count, round(us / count, 2)) for name, us in times.most_common()]
    busy, gap = round(_busy(inside) / span, 4), round(float(np.mean(between)), 1)
    return Timeline(batch, round(span / count, 1), busy, gap, kernels, _cpu_time(engine, batch))


def _cpu_time(engine: Engine, batch: int) -> dict[str, float]:
    run = engine.run(random_items(batch, 128, _CPU_STEPS))
    return {part: round(seconds * 1e6 / run.steps, 1) for part, seconds in engine.cpu.seconds.items()}


def _gap_before(events: list[Any], start: float) -> float:
    """Since the end of the last kernel before, copies and what writes changes left out."""
    step = [e for e in events if e.time_range.start < start and "_kernel" in e.name and e.name != "_scatter_kernel"]
    return float(max(start - max(e.time_range.end for e in step[-50:]), 0.0))


def _busy(events: list[Any]) -> float:
    """Time that at least one of the events covers; they are sorted by start."""
    starts = np.array([event.time_range.start for event in events])
    ends = np.maximum.accumulate([event.time_range.end for event in events])
    gaps = starts[1:] - ends[:-1]
    return float(ends[-1] - starts[0] - gaps[gaps > 0].sum())


def _print(timeline: Timeline, most: int) -> None:
    title = f"batch {timeline.batch}: {timeline.period_us:,} us a step, GPU busy {timeline.busy_share:.1%}, "
    title += f"{timeline.between_us} us between steps"
    table = Table(title=title)
    for name in ("kernel", "calls a step", "us a step"):
        table.add_column(name, justify="left" if name == "kernel" else "right", overflow="ellipsis", no_wrap=True)
    for kernel in timeline.kernels[:most]:
        table.add_row(kernel.name[:70], f"{kernel.calls:.1f}", f"{kernel.us:,.1f}")
    console = Console(width=110)
    console.print(table)
    console.print("CPU us a step: " + ", ".join(f"{part} {us:,}" for part, us in timeline.cpu_us.items()))


if __name__ == "__main__":
    typer.run(main)
