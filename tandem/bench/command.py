"""`tandem bench`: the points that were asked for, one after another, with a progress bar."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shared.errors import StartupError
from shared.security import PLAIN, ClientSecurity
from tandem.bench.config import BenchConfig
from tandem.bench.measure import Goals, Measured, measure
from tandem.bench.report import draw, print_table, require_plots, write_json
from tandem.bench.work import Item, poisson_arrivals, random_items
from tandem.client import Client

NOTE = "Measured by clients on this machine, which may be the bottleneck. Prompts are random token ids: no tokenizing."
WARM_UP = 4
ALL_AT_ONCE = float("inf")


def run(
    endpoint: str,
    config: BenchConfig,
    request_rates: Sequence[float],
    json_file: Path | None,
    plot: Path | None,
    security: ClientSecurity = PLAIN,
) -> None:
    """Measures one point for each request rate, requests a second; infinite: all at once. StartupError where a request
    would not fit the model."""
    if plot is not None:
        require_plots()
    with Client(endpoint.split(","), security=security) as client:
        model = client.model_info()
    if config.longest > model.max_context_length:
        raise StartupError(
            f"--input-len and --output-len: up to {config.longest} tokens together; {model.model_name} takes at most "
            f"{model.max_context_length}"
        )
    measured = _measure_all(endpoint, security, config, request_rates)
    title = f"{model.model_name} at {endpoint}"
    print_table(title, measured, NOTE)
    if json_file is not None:
        write_json(measured, json_file)
    if plot is not None:
        draw(title, measured, plot)


def _measure_all(
    endpoint: str, security: ClientSecurity, config: BenchConfig, request_rates: Sequence[float]
) -> list[Measured]:
    goals = Goals(config.ttft_goal, config.tpot_goal)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        bar = bars.add_task("warm-up", total=WARM_UP)
        warm_up = random_items(WARM_UP, config.input_len, min(config.output_len, 16), config.seed)
        measure(
            endpoint, "warm-up", warm_up, 1, goals, progress=lambda ended: bars.advance(bar, ended), security=security
        )
        measured = []
        for number, rate in enumerate(request_rates):
            what, items = _offer(config, rate, seed=config.seed + 1 + number)
            bar = bars.add_task(what, total=len(items))
            measured.append(
                measure(
                    endpoint,
                    what,
                    items,
                    config.clients,
                    goals,
                    config.max_concurrency,
                    lambda ended, bar=bar: bars.advance(bar, ended),  # type: ignore[misc]
                    security,
                )
            )
        return measured


def _offer(config: BenchConfig, rate: float, seed: int) -> tuple[str, list[Item]]:
    items = random_items(config.num_prompts, config.input_len, config.output_len, seed, config.range_ratio)
    if rate == ALL_AT_ONCE:
        return f"{len(items)} at once", items
    return f"{len(items)}, {rate:g}/s", poisson_arrivals(items, rate, seed)
