"""The commands `tandem top`, `bench`, `batch` and `drain`: for a service that runs. Parses; the work is elsewhere, and
imported where it begins."""

from pathlib import Path
from typing import Annotated, Any

import typer

from shared.errors import StartupError, TandemError
from shared.security import ClientSecurity
from tandem.batch.config import BatchConfig
from tandem.bench.config import BenchConfig
from tandem.client import DEFAULT_ENDPOINT
from tandem.drain import drain
from tandem.help import RUN, USE, Command, examples
from tandem.options import parameters, taken, with_parameters

Endpoint = Annotated[
    str,
    typer.Option(
        help="host:port of a running scheduler; several with commas, if they serve the same model.",
        envvar="TANDEM_ENDPOINT",
    ),
]

SECURITY = parameters(ClientSecurity, environment="TANDEM_", heading="TLS and token")
"""Options of every command that calls a service."""


def _top(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    interval: Annotated[float, typer.Option(help="Seconds between two looks, 0.1 to 60.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Prints one frame and ends: for scripts.")] = False,
    **options: Any,
) -> None:
    """Shows a running service live: throughput, latencies, K/V memory, queue, workers, latest requests.

    Rates are those since the frame before, latencies those of the latest 256 requests. Ctrl-C ends it.
    """
    from tandem.talk import connected
    from tandem.top import run

    if not 0.1 <= interval <= 60:
        raise StartupError(f"--interval {interval:g}: 0.1 to 60 is needed")
    with connected(endpoint, taken(options, ClientSecurity)) as client:
        run(client, endpoint, interval, once=once)


def _bench(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    request_rate: Annotated[
        list[float], typer.Option(help="Requests a second, at random times; inf: all at once. Repeat for more points.")
    ] = [float("inf")],  # noqa: B006
    json: Annotated[Path | None, typer.Option("--json", help="Writes the points here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draws the points here, as PNG; needs matplotlib.")] = None,
    **options: Any,
) -> None:
    """Offers random requests to a running service, and prints how fast their clients got tokens.

    Every point is a table row: tokens a second, time to the first token, gaps between messages, and goodput, the
    requests a second that kept both goals.
    """
    from tandem.bench.command import run
    from tandem.talk import connected

    security, config = taken(options, ClientSecurity), BenchConfig(**options)
    if not all(rate > 0 for rate in request_rate):
        raise StartupError("--request-rate: above 0 is needed")
    with connected(endpoint, security):
        run(endpoint, config, request_rate, json, plot, security)


def _batch(
    source: Annotated[Path, typer.Argument(metavar="INPUT", help="JSON lines in OpenAI's batch format.")],
    target: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Gets one JSON line a request.")],
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    **options: Any,
) -> None:
    """Computes a file of requests in OpenAI's batch format; goes on where it was if it is run again.

    A line of INPUT has custom_id, method (POST), url (/v1/chat/completions or /v1/completions) and body; the lines of
    OUTPUT are in the order in which they were done. Whatever kills the command, nothing is lost and nothing doubled.
    Ends with status 1 if a request failed.
    """
    from tandem.batch.command import run
    from tandem.talk import connected

    security, config = taken(options, ClientSecurity), BatchConfig(**options)
    with connected(endpoint, security):
        problem = run(endpoint, source, target, config, security)
    if problem is not None:
        raise TandemError(problem)


def _drain(
    worker: Annotated[str, typer.Argument(help="host:port of the worker group.")],
    timeout: Annotated[float, typer.Option(help="Seconds to wait, 0.1 to 86400; then the status is 1.")] = 60.0,
    **options: Any,
) -> None:
    """Takes a worker out of service: its requests move to other workers, and it gets no new ones.

    Ends when no scheduler holds the worker. The process goes on until it is told to stop; to use it again, restart it.
    """
    if not 0.1 <= timeout <= 86400:
        raise StartupError(f"--timeout {timeout:g}: 0.1 to 86400 is needed")
    drain(worker, timeout, taken(options, ClientSecurity))
    print(f"{worker} is drained: it may be stopped; `tandem top` shows which workers still serve")


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    top_examples = examples("tandem top --interval 0.5", "tandem top --once")
    app.command("top", cls=Command, rich_help_panel=USE, epilog=top_examples)(with_parameters(_top, SECURITY))
    bench_examples = examples(
        "tandem bench --num-prompts 200 --max-concurrency 32",
        "tandem bench --request-rate 2 --request-rate 8 --json points.json --plot points.png",
    )
    app.command("bench", cls=Command, rich_help_panel=USE, epilog=bench_examples)(
        with_parameters(_bench, [*parameters(BenchConfig), *SECURITY])
    )
    batch_examples = examples("tandem batch requests.jsonl results.jsonl")
    app.command("batch", cls=Command, rich_help_panel=USE, epilog=batch_examples)(
        with_parameters(_batch, [*parameters(BatchConfig), *SECURITY])
    )
    drain_examples = examples("tandem drain 10.0.0.2:50052")
    app.command("drain", cls=Command, rich_help_panel=RUN, epilog=drain_examples)(with_parameters(_drain, SECURITY))
