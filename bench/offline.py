"""A model without services: `python -m bench.offline [--model NAME] [--json FILE]`.

The scheduler core and one worker rank in one process; plans run ahead of results as they do through gRPC.
"""

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from bench.work import MODEL_HELP, TEMPERATURE, Item, bench_model, equal_lengths, mixed_lengths
from scheduler_svc.core import CoreConfig, Request, Scheduler
from shared.model_config import load_model_config
from shared.types import StepResult
from shared.wire import plan_to_pb
from worker_svc.config import WorkerConfig
from worker_svc.parallel import TensorParallel
from worker_svc.progress import Progress
from worker_svc.runner.build import build_runner, choose_device
from worker_svc.runner.group import GroupRunner

NOT_MEASURED = "Not measured: gRPC, frontends, tokenizing. Random weights in the shape that is named."
DEPTH = 3
CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement."""

    what: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Run:
    """Times of one batch of requests, seconds from its start."""

    first_tokens: float
    """When every request had a token."""
    end: float
    steps: int


class Engine:
    """Core and worker, joined by function calls."""

    def __init__(self, config: WorkerConfig) -> None:
        model = load_model_config(config.folder)
        runner = build_runner(config, model, TensorParallel(), choose_device(config, 0))
        self.attention = runner.attention
        self._group = GroupRunner(runner, TensorParallel(), Progress(np.zeros((1, 3)), 0))
        limits = runner.batch.limits
        self._core = Scheduler(
            CoreConfig(
                num_groups=1,
                vocabulary_size=limits.vocabulary_size,
                max_model_length=limits.max_model_len,
                block_size=limits.block_size,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                hash_seed=1,
            )
        )
        self._num_blocks = limits.num_blocks
        self._keys = 0

    def run(self, items: list[Item]) -> Run:
        """All requests at once, to their ends. Nothing is cached from an earlier run."""
        self._core.worker_ready(0, self._num_blocks)
        self._group.open_epoch()
        for item in items:
            self._keys += 1
            self._core.submit(_request(self._keys, item))
        pending: deque[Callable[[], StepResult]] = deque()
        seen: set[int] = set()
        steps, first = 0, 0.0
        started = time.perf_counter()
        while self._core.num_live:
            while len(pending) < DEPTH and (plan := self._core.schedule(0)) is not None:
                pending.append(self._group.step(plan_to_pb(plan, 1)))
            outputs = self._core.update(0, pending.popleft()())
            steps += 1
            if len(seen) < len(items):
                seen.update(outputs.keys.tolist())
                first = time.perf_counter() - started
        end = time.perf_counter() - started
        for wait in pending:
            wait()
        return Run(first, end, steps)


def _request(key: int, item: Item) -> Request:
    prompt = np.array(item.prompt, dtype=np.int32)
    return Request(key, str(key), 0, prompt, temperature=TEMPERATURE, seed=key, max_tokens=item.output_length)


def main(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "qwen3-0.6b",
    batches: Annotated[str, typer.Option(help="batch sizes of the decode points")] = "1,8,64,256",
    max_num_batched_tokens: Annotated[int, typer.Option(help="most tokens of a step")] = 8192,
    attention: Annotated[str, typer.Option(help="as of tandem worker")] = "auto",
    enforce_eager: Annotated[bool, typer.Option(help="as of tandem worker")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the points here")] = None,
) -> None:
    """Prints a table."""
    with bench_model(model) as (folder, load_format):
        config = WorkerConfig(
            str(folder),
            load_format=load_format,
            attention=attention,
            enforce_eager=enforce_eager,
            max_num_seqs=256,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=CONTEXT,
        )
        started = time.perf_counter()
        engine = Engine(config)
        points = [Point("time to ready", round(time.perf_counter() - started, 1), "s")]
    points += measure(engine, [int(batch) for batch in batches.split(",")])
    _print(model, engine.attention, points)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(point) for point in points], indent=2) + "\n", encoding="utf-8")


def measure(engine: Engine, batches: list[int]) -> list[Point]:
    """Decode by batch size, prefill, and the mixed work."""
    engine.run(equal_lengths(8, 128, 16))
    points = []
    for batch in batches:
        run = engine.run(equal_lengths(batch, 128, 256))
        points.append(Point(f"time per output token, batch {batch}", _ms((run.end - run.first_tokens) / 255), "ms"))
    run = engine.run(equal_lengths(32, 2048, 1))
    points.append(Point("prefill, 32 x 2048", round(32 * 2048 / run.end), "tokens/s"))
    items = mixed_lengths()
    run = engine.run(items)
    tokens = sum(item.output_length for item in items)
    points.append(Point("mixed work, output", round(tokens / run.end), "tokens/s"))
    points.append(Point("mixed work, steps", run.steps, ""))
    points.append(Point("mixed work, time", round(run.end, 3), "s"))
    return points


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _print(model: str, attention: str, points: list[Point]) -> None:
    table = Table(title=f"{model}, attention {attention}")
    for name in Point.__dataclass_fields__:
        table.add_column(name, justify="left" if name == "what" else "right")
    for point in points:
        table.add_row(point.what, f"{point.value:,}", point.unit)
    console = Console(width=100)
    console.print(table)
    console.print(NOT_MEASURED)


if __name__ == "__main__":
    typer.run(main)
