"""A model through the services: `python -m bench.serving [--model NAME] [--json FILE]`.

`tandem worker` and `tandem scheduler` as an operator starts them, and client processes that stream over gRPC. For what
that costs against one process: bench.compare.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from bench.services import services
from bench.work import (
    MIXED,
    MODEL_HELP,
    bench_model,
    context_of,
    decode_name,
    mixed_lengths,
    prefill_length,
    prefill_name,
)
from tandem.bench.measure import Goals, measure
from tandem.bench.report import draw, print_table, write_json
from tandem.bench.work import Item, poisson_arrivals, random_items

NOT_MEASURED = "Not measured: a network, tokenizing. Clients, frontends, core and worker share this machine's cores."


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
        measure(endpoint, "warm-up", random_items(32, prompt_length, 16), clients, goals)
        for what, items in _offers(batches, rates, requests, prompt_length):
            points.append(measure(endpoint, what, items, clients, goals))
    title = f"{model} through the services"
    print_table(title, points, NOT_MEASURED)
    if plot is not None:
        draw(title, points, plot)
    if json_file is not None:
        write_json(points, json_file)


def _offers(batches: str, rates: str, requests: int, prompt_length: int) -> Iterator[tuple[str, list[Item]]]:
    for batch in (int(size) for size in batches.split(",") if size):
        yield decode_name(batch), random_items(batch, 128, 256, batch)
    yield prefill_name(prompt_length), random_items(32, prompt_length, 1, seed=3)
    mixed = mixed_lengths()[:requests]
    yield MIXED, mixed
    for rate in (float(rate) for rate in rates.split(",") if rate):
        yield f"mixed, {rate:g}/s", poisson_arrivals(mixed, rate)


if __name__ == "__main__":
    typer.run(main)
