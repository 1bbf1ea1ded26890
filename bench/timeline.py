"""Where a step's time goes on the GPU: `python -m bench.timeline [--model NAME] [--tensor-parallel N] [--json FILE]`.

For each batch size its decode steps, then the steps of 32 long prompts: the period from one step's first kernel to the
next one's, the share of it in which each GPU works, what ranks wait for each other, and the time of each kind of
kernel. The CPU time of a step's parts is that of other runs without the profiler; core and worker are one process
there, but for the other ranks.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, NoReturn

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from bench.gpu_trace import DECODE, MIXED, StepTime, load_trace, recorded, step_times
from bench.offline import Engine
from bench.ranks import run_ranks
from bench.work import CONTEXT, MODEL_HELP, PREFILL, SEQUENCES, bench_model, decode_name, prefill_name
from shared.model_config import load_model_config
from shared.process import die_with_parent
from shared.settings import from_json, to_json
from shared.types import StepPlan
from tandem.bench.work import Item, random_items
from worker_svc.config import WorkerConfig
from worker_svc.progress import Progress
from worker_svc.runner.build import start_rank
from worker_svc.runner.group import follow
from worker_svc.runner.runner import PendingTokens, Runner

_SKIPPED = 8  # decode steps after the prompts
_CPU_STEPS = 256
_LEAST_TOKENS = 1024  # of prompts in a step
_PROMPTS = 0
"""In place of a batch size: 32 prompts of PREFILL tokens."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is measured: `batches` of sequences, _PROMPTS among them, whose prompts have `prompt` tokens."""

    batches: tuple[int, ...]
    prompt: int
    steps: int

    def items(self, batch: int, steps: int) -> list[Item]:
        """Requests of which all have so many decode steps left when the last one begins its own."""
        if not batch:
            return random_items(32, PREFILL, 1)
        return random_items(batch, self.prompt, steps + batch * self.prompt // _LEAST_TOKENS)


def main(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "qwen3-0.6b",
    batches: Annotated[str, typer.Option(help="batch sizes")] = "8,256",
    prompt: Annotated[int, typer.Option(help="tokens of a sequence before its decode steps")] = 128,
    steps: Annotated[int, typer.Option(help="decode steps that are profiled")] = 32,
    tensor_parallel: Annotated[int, typer.Option(help="as of tandem worker")] = 1,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="as of tandem worker")] = None,
    most: Annotated[int, typer.Option(help="kernels shown")] = 14,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the timelines here")] = None,
) -> None:
    """Prints a table for each batch size, and one for prompts."""
    work = Work((*map(int, batches.split(",")), _PROMPTS), prompt, steps)
    timelines: dict[str, StepTime] = {}
    with bench_model(model) as (folder, load_format), TemporaryDirectory() as scratch:
        config = WorkerConfig(
            str(folder),
            load_format=load_format,
            tensor_parallel=tensor_parallel,
            max_num_seqs=SEQUENCES,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=CONTEXT,
        )
        run_ranks("bench.timeline", tensor_parallel, [to_json(config), to_json(work), scratch])
        for batch in work.batches:
            traces = [load_trace(_trace_file(Path(scratch), rank, batch)) for rank in range(tensor_parallel)]
            found = step_times(traces, DECODE, _SKIPPED, steps) if batch else step_times(traces, MIXED, 1)
            assert found is not None, "the work has such steps"
            timelines[_name(batch)] = found
        cpu = json.loads((Path(scratch) / "cpu").read_text(encoding="utf-8"))
    for what, timeline in timelines.items():
        _print(what, timeline, cpu[what], most)
    if json_file is not None:
        both = {what: {**asdict(timeline), "cpu_us": cpu[what]} for what, timeline in timelines.items()}
        json_file.write_text(json.dumps(both, indent=2), encoding="utf-8")


def rank_main(rank: int, config: WorkerConfig, work: Work, folder: Path) -> NoReturn:
    """Every batch twice: the first time rank 0 looks at its CPU time, the second time all record their GPUs."""
    runner, group = start_rank(config, load_model_config(config.folder), rank, folder / "rendezvous")
    files = [_trace_file(folder, rank, batch) for batch in work.batches]
    if rank:
        recording = _Recorded(runner, iter([*[None] * len(files), *files]))
        follow(recording, group, Progress(np.zeros((1, 3)), 0))
        recording.close()
    else:
        engine = Engine(runner, group)
        cpu = {_name(batch): _cpu_time(engine, work.items(batch, _CPU_STEPS)) for batch in work.batches}
        (folder / "cpu").write_text(json.dumps(cpu), encoding="utf-8")
        for batch, file in zip(work.batches, files, strict=True):
            with recorded(file):
                engine.run(work.items(batch, work.steps + _SKIPPED))
        engine.close()
    os._exit(0)  # as worker_svc.main does


class _Recorded:
    """The runner of a rank that follows. Each of its epochs is recorded in its file, if it has one."""

    def __init__(self, runner: Runner, files: Iterator[Path | None]) -> None:
        self._runner = runner
        self._files = files
        self._recording = ExitStack()

    def open_epoch(self) -> None:
        """See PlanRunner."""
        self._recording.close()
        self._runner.open_epoch()
        file = next(self._files)
        if file is not None:
            self._recording.enter_context(recorded(file))

    def step(self, plan: StepPlan) -> PendingTokens:
        """See PlanRunner."""
        return self._runner.step(plan)

    def close(self) -> None:
        """Ends the last recording."""
        self._recording.close()


def _cpu_time(engine: Engine, items: list[Item]) -> dict[str, float]:
    run = engine.run(items)
    return {part: round(seconds * 1e6 / run.steps, 1) for part, seconds in engine.cpu.seconds.items()}


def _name(batch: int) -> str:
    return decode_name(batch) if batch else prefill_name(PREFILL)


def _trace_file(folder: Path, rank: int, batch: int) -> Path:
    return folder / f"{rank}-{batch}.npz"


def _print(what: str, timeline: StepTime, cpu_us: dict[str, float], most: int) -> None:
    title = f"{what}: {timeline.period_us:,} us a step ({timeline.steps} steps), {timeline.between_us} us between steps"
    table = Table(title=title)
    for name in ("kernel of GPU 0", "calls a step", "us a step"):
        table.add_column(
            name, justify="left" if name == "kernel of GPU 0" else "right", overflow="ellipsis", no_wrap=True
        )
    for kernel in timeline.ranks[0].kernels[:most]:
        table.add_row(kernel.name[:70], f"{kernel.calls:.1f}", f"{kernel.us:,.1f}")
    console = Console(width=110)
    console.print(table)
    for number, rank in enumerate(timeline.ranks):
        times = f"collectives {rank.collectives_us:,} us, of that waiting for another rank {rank.waiting_us:,}"
        console.print(f"GPU {number}: busy {rank.busy_share:.1%}; {times}")
    console.print("CPU us a step: " + ", ".join(f"{part} {us:,}" for part, us in cpu_us.items()))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].isdigit():
        die_with_parent()
        rank, config, work, folder = sys.argv[1:]
        rank_main(int(rank), from_json(WorkerConfig, config), from_json(Work, work), Path(folder))
    else:
        typer.run(main)
