"""A model through the services: `python -m bench.serving [--model NAME] [--json FILE]`.

`tandem worker` and `tandem scheduler` as an operator starts them, and client processes that stream over gRPC. For what
that costs against one process: bench.compare.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, TypeAlias

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from bench.plots import draw
from bench.services import client, services
from bench.work import (
    MIXED,
    MODEL_HELP,
    Item,
    bench_model,
    context_of,
    decode_name,
    equal_lengths,
    mixed_lengths,
    poisson_arrivals,
    prefill_length,
    prefill_name,
)

NOT_MEASURED = "Not measured: a network, tokenizing. Clients, frontends, core and worker share this machine's cores."
_LEAD_S = 3.0  # until all clients have started and connected
_LATE_S = 0.02  # what a client that starts in time keeps

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Point:
    """One batch of requests."""

    what: str
    prompt_tokens_per_second: int
    tokens_per_second: int
    """Of output."""
    goodput: float
    """Requests a second whose first token and whose mean time per further token were within the goals."""
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    tpot_ms: float
    """Mean over the streams of (last - first) / (tokens - 1), with what later streams' prompts take; 0 without any."""
    decode_ms: float
    """From when every stream had begun to the end, per further token; 0 where streams differ in length."""


def main(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "qwen3-0.6b",
    batches: Annotated[str, typer.Option(help="batch sizes of the decode points")] = "1,8,64,256",
    frontends: Annotated[int, typer.Option(help="frontend processes")] = 4,
    clients: Annotated[int, typer.Option(help="client processes")] = 4,
    tensor_parallel: Annotated[int, typer.Option(help="as of tandem worker")] = 1,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="as of tandem worker")] = None,
    requests: Annotated[int, typer.Option(help="requests of the mixed work, at most 256")] = 256,
    rates: Annotated[str, typer.Option(help="requests a second of points with Poisson arrivals; empty: none")] = "",
    ttft_goal: Annotated[float, typer.Option(help="goodput: most milliseconds to the first token")] = 500.0,
    tpot_goal: Annotated[float, typer.Option(help="goodput: most milliseconds per further token, mean")] = 15.0,
    plot: Annotated[Path | None, typer.Option(help="draw the points there, as PNG")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the points here")] = None,
) -> None:
    """Prints a table."""
    points = []
    goals = Goals(ttft_goal, tpot_goal)
    with (
        bench_model(model) as (folder, load_format),
        services(folder, load_format, frontends, max_num_batched_tokens, tensor_parallel) as endpoint,
    ):
        prompt_length = prefill_length(context_of(folder))
        measure(endpoint, "warm-up", equal_lengths(32, prompt_length, 16), clients, goals)
        for what, items in _offers(batches, rates, requests, prompt_length):
            points.append(measure(endpoint, what, items, clients, goals))
    _print(model, points)
    if plot is not None:
        draw(model, [asdict(point) for point in points], plot)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(point) for point in points], indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Goals:
    """What a good request keeps, milliseconds."""

    ttft_ms: float
    tpot_ms: float


def _offers(batches: str, rates: str, requests: int, prompt_length: int) -> Iterator[tuple[str, list[Item]]]:
    for batch in (int(size) for size in batches.split(",") if size):
        yield decode_name(batch), equal_lengths(batch, 128, 256, batch)
    yield prefill_name(prompt_length), equal_lengths(32, prompt_length, 1, seed=3)
    mixed = mixed_lengths()[:requests]
    yield MIXED, mixed
    for rate in (float(rate) for rate in rates.split(",") if rate):
        yield f"mixed, {rate:g}/s", poisson_arrivals(mixed, rate)


def measure(endpoint: str, what: str, items: list[Item], clients: int, goals: Goals) -> Point:
    """Offers the requests from several processes."""
    with TemporaryDirectory() as scratch:
        start = time.time() + _LEAD_S
        outputs = [Path(scratch) / f"{number}.npz" for number in range(min(clients, len(items)))]
        readers = [
            client(endpoint, start, output, items[number :: len(outputs)]) for number, output in enumerate(outputs)
        ]
        for reader in readers:
            if reader.wait() != 0:
                sys.exit("a client failed: see its message above")
        seen = [np.load(output) for output in outputs]
    arrival, late, first, last, tokens, gaps = (np.concatenate([file[name] for file in seen]) for name in _COLUMNS)
    if late.max() > _LATE_S:
        print(f"{what}: a request was sent {late.max() * 1e3:.0f} ms after its arrival", file=sys.stderr)
    ttft, tpot, seconds = (first - arrival) * 1e3, (last - first) / np.maximum(tokens - 1, 1) * 1e3, last.max() - start
    good = (ttft <= goals.ttft_ms) & (tpot <= goals.tpot_ms)
    return Point(
        what=what,
        prompt_tokens_per_second=round(sum(len(item.prompt) for item in items) / float(seconds)),
        tokens_per_second=round(float(tokens.sum() / seconds)),
        goodput=round(float(good.sum() / seconds), 2),
        ttft_p50_ms=_percentile(ttft, 50),
        ttft_p99_ms=_percentile(ttft, 99),
        gap_p50_ms=_percentile(gaps * 1e3, 50),
        gap_p99_ms=_percentile(gaps * 1e3, 99),
        tpot_ms=round(float(tpot.mean()), 3),
        decode_ms=_decode_ms(first, last, tokens),
    )


_COLUMNS = ("arrival", "late", "first", "last", "tokens", "gaps")


def _decode_ms(first: Floats, last: Floats, tokens: Floats) -> float:
    """See Point."""
    equal = tokens.min() == tokens.max() > 1
    return round(float((last.max() - first.max()) / (tokens.max() - 1) * 1e3), 3) if equal else 0.0


def _percentile(values: Floats, share: int) -> float:
    return round(float(np.percentile(values, share)), 2) if len(values) else 0.0


def _print(model: str, points: list[Point]) -> None:
    table = Table(title=f"{model} through the services")
    for name in Point.__dataclass_fields__:
        table.add_column(name.replace("_", " "), justify="left" if name == "what" else "right")
    for point in points:
        table.add_row(*(value if isinstance(value, str) else f"{value:,}" for value in asdict(point).values()))
    console = Console(width=130)
    console.print(table)
    console.print(NOT_MEASURED)


if __name__ == "__main__":
    typer.run(main)
