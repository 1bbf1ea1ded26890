"""The scheduler core alone: `python -m bench.scheduler [--json FILE]`.

Steady decode: schedule + update + encode of one step, the prefix cache on, plans two ahead of results. Admission:
submit + schedule + encode of the plan that takes a prompt in, cold and with all of it in the prefix cache.
"""

import gc
import json
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from scheduler_svc.core import CoreConfig, Request, Scheduler
from shared.types import IntArray, StepPlan, StepResult
from shared.wire import plan_to_pb

NOT_MEASURED = (
    "Not measured: decoding of results, packing tokens for frontends, gRPC, the event loop. One process, one core, "
    "garbage collection as in the core process (everything frozen after start-up). Times are processor time of the "
    "thread, so that what else runs on the machine counts only as far as it slows the core down."
)
VOCABULARY_SIZE = 151_936
STOP_TOKENS = (151_643, 151_645)
DEPTH = 2


@dataclass(frozen=True, slots=True)
class Point:
    """Times of one measurement, microseconds."""

    what: str
    size: int
    """Sequences running, or tokens of the prompt."""
    median_us: float
    p99_us: float
    schedule_us: float
    """Median of schedule alone; of submit and schedule for an admission."""
    update_us: float
    encode_us: float


def main(
    running: Annotated[str, typer.Option(help="numbers of running sequences")] = "16,64,256,1024",
    prompts: Annotated[str, typer.Option(help="lengths of admitted prompts, tokens")] = "1024,8192,32768",
    steps: Annotated[int, typer.Option(help="steps of a decode point")] = 2000,
    repeats: Annotated[int, typer.Option(help="admissions of an admission point")] = 100,
    block_size: Annotated[int, typer.Option(help="tokens per K/V block")] = 64,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the points here")] = None,
) -> None:
    """Prints a table."""
    points = [steady_decode(int(number), steps, block_size) for number in running.split(",")]
    for length in prompts.split(","):
        points += admission(int(length), repeats, block_size)
    _print(points)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(point) for point in points], indent=2) + "\n", encoding="utf-8")


class SamplingRows:
    """Tells how many tokens a plan samples, as a worker knows it."""

    def __init__(self) -> None:
        self._to_compute: dict[int, int] = {}

    def count(self, plan: StepPlan) -> int:
        """Each plan once, in order."""
        for admission in plan.admitted:
            self._to_compute[admission.slot] = admission.known_length - admission.cached_length
        for slot, _, known in plan.rows.tolist():
            self._to_compute[slot] -= known
        return sum(self._to_compute[slot] == 0 for slot in plan.rows[:, 0].tolist())


def steady_decode(running: int, steps: int, block_size: int) -> Point:
    """No sequence starts or ends while steps are timed; block boundaries fall as prompts of random lengths have it."""
    rng = np.random.default_rng(0)
    longest = 300 + steps + 2 * running  # prefill takes a step for every few sequences
    core = _core(running, longest, longest // block_size * running + running, block_size)
    for key in range(running):
        core.submit(_request(key, _tokens(rng, int(rng.integers(100, 300)))))
    rows = SamplingRows()
    all_decode = False
    while not all_decode:
        plan = _next_plan(core)
        core.update(0, _result(plan, _tokens(rng, rows.count(plan))))
        all_decode = len(plan.rows) == running and not len(plan.token_ids)
    plans = deque(_next_plan(core) for _ in range(DEPTH))
    return _point("steady decode", running, np.array(list(_decode_steps(core, plans, _tokens(rng, running), steps))))


def _decode_steps(
    core: Scheduler, plans: deque[StepPlan], tokens: IntArray, steps: int
) -> Iterator[tuple[float, float, float]]:
    _settle_memory()
    for _ in range(steps):
        result = _result(plans.popleft(), tokens)
        start = time.thread_time()
        core.update(0, result)
        updated = time.thread_time()
        plan = _next_plan(core)
        scheduled = time.thread_time()
        assert len(plan.rows) == len(tokens)
        plan_to_pb(plan, 1).SerializeToString()
        encoded = time.thread_time()
        plans.append(plan)
        yield scheduled - updated, updated - start, encoded - scheduled


def admission(length: int, repeats: int, block_size: int) -> list[Point]:
    """Each prompt cold, then again with all of it cached; one plan computes it whole."""
    rng = np.random.default_rng(0)
    core = _core(16, length + 64, 4 * (length // block_size + 2), block_size, tokens=length)
    times: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    _settle_memory()
    for repeat in range(repeats):
        prompt = _tokens(rng, length)
        for cached in (False, True):
            request = _request(2 * repeat + cached, prompt)
            start = time.thread_time()
            core.submit(request)
            plan = _next_plan(core)
            scheduled = time.thread_time()
            assert (plan.admitted[0].cached_length > 0) == cached
            plan_to_pb(plan, 1).SerializeToString()
            times[cached].append((scheduled - start, 0.0, time.thread_time() - scheduled))
            core.update(0, _result(plan, _tokens(rng, 1)))
            core.abort(request.key)
    names = {False: "admission, cold", True: "admission, cached"}
    return [_point(names[cached], length, np.array(times[cached])) for cached in times]


def _core(slots: int, longest: int, num_blocks: int, block_size: int, tokens: int = 8192) -> Scheduler:
    config = CoreConfig(
        vocabulary_size=VOCABULARY_SIZE,
        max_model_length=longest,
        block_size=block_size,
        max_num_seqs=slots,
        max_num_batched_tokens=max(tokens, slots),
        hash_seed=1,
    )
    core = Scheduler(config)
    core.worker_ready(0, num_blocks)
    return core


def _next_plan(core: Scheduler) -> StepPlan:
    plan = core.schedule(0)
    assert plan is not None, "there is always something to compute"
    return plan


def _request(key: int, prompt: IntArray) -> Request:
    return Request(key, f"request-{key}", 0, prompt, stop_token_ids=STOP_TOKENS)


def _tokens(rng: np.random.Generator, count: int) -> IntArray:
    return rng.integers(0, STOP_TOKENS[0], count, dtype=np.int32)


def _result(plan: StepPlan, tokens: IntArray) -> StepResult:
    return StepResult(plan.epoch, plan.step_id, tokens)


def _settle_memory() -> None:
    gc.collect()
    gc.freeze()


def _point(what: str, size: int, seconds: "np.ndarray[tuple[int, int], np.dtype[np.float64]]") -> Point:
    times = seconds * 1e6  # [num_steps, 3]: schedule, update, encode
    total = times.sum(axis=1)
    parts = [round(float(part), 1) for part in np.median(times, axis=0)]
    return Point(what, size, round(float(np.median(total)), 1), round(float(np.percentile(total, 99)), 1), *parts)


def _print(points: list[Point]) -> None:
    table = Table(title="Scheduler core, microseconds")
    for name in Point.__dataclass_fields__:
        table.add_column(name.removesuffix("_us"), justify="left" if name == "what" else "right")
    for point in points:
        table.add_row(*(value if isinstance(value, str) else f"{value:,}" for value in asdict(point).values()))
    console = Console(width=110)
    console.print(table)
    console.print(NOT_MEASURED)


if __name__ == "__main__":
    typer.run(main)
