"""One rank of bench.timeline, a process: `python -m bench.timeline_rank RANK CONFIG WORK FOLDER`.

Leaves in the folder what its GPU did for each work, `RANK-WORK.npz`, and rank 0 how long it took without the profiler
and what the CPU did, `runs`.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from bench.gpu_trace import recorded
from bench.offline import Engine
from bench.work import MIXED, PREFILL, decode_name, mixed_lengths, prefill_name
from shared.model_config import load_model_config
from shared.process import die_with_parent
from shared.settings import from_json
from shared.types import StepPlan
from tandem.bench.work import Item, random_items
from worker_svc.config import WorkerConfig
from worker_svc.progress import Progress
from worker_svc.runner.build import start_rank
from worker_svc.runner.group import follow
from worker_svc.runner.runner import PendingTokens, PlanRunner

SKIPPED = 8
"""Decode steps after the prompts that are not looked at."""
PROMPTS = prefill_name(PREFILL)
_CPU_STEPS = 256
_LEAST_TOKENS = 1024  # of prompts in a step


@dataclass(frozen=True, slots=True)
class Work:
    """What is measured, one after another."""

    batches: tuple[int, ...]
    """Sequences with prompts of `prompt` tokens."""
    prompt: int
    steps: int
    """Decode steps of a batch that are looked at."""
    mixed: bool
    """Whether the mixed work comes too. Long prompts always do."""

    @property
    def names(self) -> list[str]:
        """Of the points that they are."""
        return [*map(decode_name, self.batches), PROMPTS, *([MIXED] if self.mixed else [])]

    def items(self, steps: int) -> list[list[Item]]:
        """Their requests. Those of a batch all have so many steps left when the last one begins to decode."""
        batches = [
            random_items(batch, self.prompt, steps + batch * self.prompt // _LEAST_TOKENS) for batch in self.batches
        ]
        return [*batches, random_items(32, PREFILL, 1), *([mixed_lengths()] if self.mixed else [])]


@dataclass(frozen=True, slots=True)
class TimedRun:
    """All requests of a work, prompts included, without the profiler."""

    seconds: float
    steps: int
    cpu_us: dict[str, float]
    """Thread time of each part of a step."""


def trace_file(folder: Path, rank: int, name: str) -> Path:
    """What a rank's GPU did."""
    return folder / f"{rank}-{name}.npz"


def main(rank: int, config: WorkerConfig, work: Work, folder: Path) -> NoReturn:
    """All of it twice: the first time rank 0 looks at its CPU time, the second time all record their GPUs."""
    runner, group = start_rank(config, load_model_config(config.folder), rank, folder / "rendezvous")
    files = [trace_file(folder, rank, name) for name in work.names]
    if rank:
        recording = _Recorded(runner, iter([*[None] * len(files), *files]))
        follow(recording, group, Progress(np.zeros((1, 3)), 0))
        recording.close()
    else:
        engine = Engine(runner, group)
        runs = [asdict(_timed(engine, items)) for items in work.items(_CPU_STEPS)]
        (folder / "runs").write_text(json.dumps(dict(zip(work.names, runs, strict=True))), encoding="utf-8")
        for items, file in zip(work.items(work.steps + SKIPPED), files, strict=True):
            with recorded(file):
                engine.run(items)
        engine.close()
    os._exit(0)  # as worker_svc.main does


class _Recorded:
    """The runner of a rank that follows. Each of its epochs is recorded in its file, if it has one."""

    def __init__(self, runner: PlanRunner, files: Iterator[Path | None]) -> None:
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


def _timed(engine: Engine, items: list[Item]) -> TimedRun:
    run = engine.run(items)
    cpu_us = {part: round(seconds * 1e6 / run.steps, 1) for part, seconds in engine.cpu.seconds.items()}
    return TimedRun(round(run.end, 3), run.steps, cpu_us)


if __name__ == "__main__":
    die_with_parent()
    main(int(sys.argv[1]), from_json(WorkerConfig, sys.argv[2]), from_json(Work, sys.argv[3]), Path(sys.argv[4]))
