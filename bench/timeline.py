"""Where a step's time goes on the GPU: `python -m bench.timeline [--model NAME] [--tensor-parallel N] [--json FILE]`.

For each batch size its decode steps, then the steps of 32 long prompts, then with --mixed both kinds of the mixed work:
the period from one step's first kernel to the next one's, the share of it in which each GPU works, what ranks wait for
each other, and the time of each kind of kernel. The CPU time of a step's parts is that of other runs without the
profiler; core and worker are one process there, but for the other ranks.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.gpu_trace import DECODE, MIXED, StepTime, Trace, load_trace, step_times
from bench.ranks import run_ranks
from bench.timeline_rank import PROMPTS, SKIPPED, Work, trace_file
from bench.work import CONTEXT, MODEL_HELP, SEQUENCES, bench_model
from bench.work import MIXED as MIXED_WORK
from shared.settings import to_json
from worker_svc.config import WorkerConfig


def main(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "qwen3-0.6b",
    batches: Annotated[str, typer.Option(help="batch sizes")] = "8,256",
    prompt: Annotated[int, typer.Option(help="tokens of a sequence before its decode steps")] = 128,
    steps: Annotated[int, typer.Option(help="decode steps that are profiled")] = 32,
    mixed: Annotated[bool, typer.Option(help="the mixed work too")] = False,
    tensor_parallel: Annotated[int, typer.Option(help="as of tandem worker")] = 1,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="as of tandem worker")] = None,
    most: Annotated[int, typer.Option(help="kernels shown")] = 14,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the timelines here")] = None,
) -> None:
    """Prints a table for each kind of step."""
    work = Work(tuple(int(batch) for batch in batches.split(",") if batch), prompt, steps, mixed)
    with bench_model(model) as (folder, load_format), TemporaryDirectory() as scratch:
        config = WorkerConfig(
            str(folder),
            load_format=load_format,
            tensor_parallel=tensor_parallel,
            max_num_seqs=SEQUENCES,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=CONTEXT,
        )
        run_ranks("bench.timeline_rank", tensor_parallel, [to_json(config), to_json(work), scratch])
        timelines: dict[str, StepTime] = {}
        for name in work.names:
            files = [trace_file(Path(scratch), rank, name) for rank in range(tensor_parallel)]
            timelines.update(_timelines(name, [load_trace(file) for file in files], steps))
        runs = json.loads((Path(scratch) / "runs").read_text(encoding="utf-8"))
    for what, timeline in timelines.items():
        _print(what, timeline, most)
    for name, run in runs.items():
        parts = ", ".join(f"{part} {us:,}" for part, us in run["cpu_us"].items())
        print(f"{name}, without the profiler: {run['steps']:,} steps in {run['seconds']} s; CPU us a step: {parts}")
    if json_file is not None:
        json_file.write_text(
            json.dumps({"steps": {what: asdict(time) for what, time in timelines.items()}, "runs": runs}, indent=2)
        )


def _timelines(name: str, traces: Sequence[Trace], steps: int) -> Iterator[tuple[str, StepTime]]:
    """The kinds of steps that a work is about."""
    kinds = {PROMPTS: [(MIXED, 1, None)], MIXED_WORK: [(MIXED, 1, None), (DECODE, 0, None)]}
    for kind, skipped, most in kinds.get(name, [(DECODE, SKIPPED, steps)]):
        found = step_times(traces, kind, skipped, most)
        assert found is not None, "the work has such steps"
        yield f"{name}, {'prompts' if kind == MIXED else 'decode'}" if name == MIXED_WORK else name, found


def _print(what: str, timeline: StepTime, most: int) -> None:
    title = f"{what}: {timeline.period_us:,} us a step ({timeline.steps} steps), {timeline.between_us} us between steps"
    table = Table(title=title)
    for name in ("kernel of GPU 0", "calls a step", "us a step", "added to the step"):
        table.add_column(
            name, justify="left" if name == "kernel of GPU 0" else "right", overflow="ellipsis", no_wrap=True
        )
    for kernel in timeline.ranks[0].kernels[:most]:
        table.add_row(kernel.name[:70], f"{kernel.calls:.1f}", f"{kernel.us:,.1f}", f"{kernel.added_us:,.1f}")
    console = Console(width=110)
    console.print(table)
    for number, rank in enumerate(timeline.ranks):
        times = f"collectives {rank.collectives_us:,} us, of that waiting for another rank {rank.waiting_us:,}"
        console.print(f"GPU {number}: busy {rank.busy_share:.1%}; {times}")


if __name__ == "__main__":
    typer.run(main)
