"""A model without services: `python -m bench.offline [--model NAME] [--json FILE]`.

The scheduler core and one worker rank in one process; plans run ahead of results as they do through gRPC.
"""

import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from bench.work import (
    MIXED,
    MODEL_HELP,
    RATE,
    SEQUENCES,
    bench_model,
    context_of,
    decode_name,
    mixed_lengths,
    prefill_length,
    prefill_name,
)
from scheduler_svc.core import CoreConfig, Request, Scheduler
from shared.model_config import load_model_config
from shared.types import StepResult
from shared.wire import plan_to_pb
from tandem.bench.work import TEMPERATURE, Item, random_items
from worker_svc.config import WorkerConfig
from worker_svc.parallel import TensorParallel
from worker_svc.progress import Progress
from worker_svc.runner.build import build_runner, choose_device
from worker_svc.runner.group import GroupRunner
from worker_svc.runner.runner import Runner

NOT_MEASURED = "Not measured: gRPC, frontends, tokenizing. Random weights in the shape that is named."
DEPTH = 3


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


class CpuTime:
    """What a thread's CPU spends on each part of its work, seconds."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts the block."""
        started = time.thread_time()
        yield
        self.seconds[name] += time.thread_time() - started


class Engine:
    """Core and worker, joined by function calls."""

    def __init__(self, runner: Runner, group: TensorParallel) -> None:
        """Of the first rank; the others follow it."""
        self.attention = runner.attention
        self._group = GroupRunner(runner, group, Progress(np.zeros((1, 3)), 0))
        limits = runner.batch.limits
        self.context = limits.max_model_len
        self._core = Scheduler(
            CoreConfig(
                vocabulary_size=limits.vocabulary_size,
                max_model_length=limits.max_model_len,
                block_size=limits.block_size,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                hash_seed=1,
            )
        )
        self._num_blocks = limits.num_blocks
        self._vocabulary_size = limits.vocabulary_size
        self._keys = 0
        self.cpu = CpuTime()
        """Of the last run."""

    def close(self) -> None:
        """Ends the other ranks."""
        self._group.close()

    def run(self, items: list[Item]) -> Run:
        """All requests at once, to their ends. Nothing is cached from an earlier run."""
        self._core.worker_ready(0, self._num_blocks)
        self._group.open_epoch()
        self.cpu = CpuTime()
        for item in items:
            self._keys += 1
            self._core.submit(self._request(item))
        pending: deque[Callable[[], StepResult]] = deque()
        seen: set[int] = set()
        steps, first = 0, 0.0
        started = time.perf_counter()
        while self._core.num_live:
            while len(pending) < DEPTH and (wait := self._begin()) is not None:
                pending.append(wait)
            with self.cpu.part("wait for the result"):
                result = pending.popleft()()
            with self.cpu.part("update"):
                outputs = self._core.update(0, result)
            steps += 1
            if len(seen) < len(items):
                seen.update(outputs.keys.tolist())
                first = time.perf_counter() - started
        end = time.perf_counter() - started
        for wait in pending:
            wait()
        return Run(first, end, steps)

    def _request(self, item: Item) -> Request:
        """Its prompt is folded into the model's vocabulary."""
        key, prompt = self._keys, np.array(item.prompt, dtype=np.int32) % self._vocabulary_size
        return Request(key, str(key), 0, prompt, temperature=TEMPERATURE, seed=key, max_tokens=item.output_length)

    def _begin(self) -> Callable[[], StepResult] | None:
        """Schedules a step and launches it; None: nothing is to be done."""
        with self.cpu.part("schedule"):
            plan = self._core.schedule(0)
        if plan is None:
            return None
        with self.cpu.part("encode the plan"):
            message = plan_to_pb(plan, 1)
        with self.cpu.part("decode, fold and launch"):
            return self._group.step(message)


def main(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "qwen3-0.6b",
    batches: Annotated[str, typer.Option(help="batch sizes of the decode points")] = "1,8,64,256",
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="as of tandem worker")] = None,
    requests: Annotated[int, typer.Option(help="requests of the mixed work, at most 256")] = 256,
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
            max_num_seqs=SEQUENCES,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=context_of(folder),
        )
        started = time.perf_counter()
        device = choose_device(config, 0)
        engine = Engine(build_runner(config, load_model_config(folder), TensorParallel(), device), TensorParallel())
        points = [Point("time to ready", round(time.perf_counter() - started, 1), "s")]
    points += measure(engine, [int(batch) for batch in batches.split(",") if batch], requests)
    _print(model, engine.attention, points)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(point) for point in points], indent=2) + "\n", encoding="utf-8")


def measure(engine: Engine, batches: list[int], requests: int) -> list[Point]:
    """Decode by batch size, prefill, and the mixed work."""
    engine.run(random_items(8, 128, 16))
    points = []
    for batch in batches:
        run = engine.run(random_items(batch, 128, 256))
        points.append(Point(decode_name(batch), _ms((run.end - run.first_tokens) / 255), "ms a token"))
    length = prefill_length(engine.context)
    run = engine.run(random_items(32, length, 1))
    points.append(Point(prefill_name(length), round(32 * length / run.end), RATE))
    items = mixed_lengths()[:requests]
    run = engine.run(items)
    tokens = sum(item.output_length for item in items)
    points.append(Point(MIXED, round(tokens / run.end), RATE))
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
