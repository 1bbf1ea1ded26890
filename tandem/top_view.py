"""What `tandem top` shows: one frame as a rich renderable. Asks nobody, knows no clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tandem.values import Load, ModelInfo, RequestStats, Stats, WorkerLoad

SHOWN_REQUESTS = 10
_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Frame:
    """One look at a service. Rates are per second, since the look before."""

    endpoint: str
    model: ModelInfo | None
    """None before the first worker, whose answer is a part of it."""
    stats: Stats
    generation_rate: float
    generation_rates: tuple[float, ...]
    """Of the looks before, oldest first, this one included."""
    prompt_rate: float
    request_rate: float


def view(frame: Frame, problem: str | None = None) -> RenderableType:
    """The whole frame; `problem` is why there is no newer one."""
    first = _throughput(frame) if frame.model is not None else _waiting(frame.stats.load)
    parts: list[RenderableType] = [first, *_workers(frame.stats.load.workers)]
    if frame.stats.latest:
        parts += [_latencies(frame.stats.latest), _latest(frame.stats.latest[:SHOWN_REQUESTS])]
    if problem is not None:
        parts.insert(0, Text(f"no answer, trying again: {problem}", style="bold red"))
    model = frame.model
    named = "tandem" if model is None else f"{model.model_name} ({model.architecture}, {model.dtype})"
    title = f"{named} at {frame.endpoint}"
    spaced = [line for part in parts for line in (part, Text())][:-1]
    return Panel(Group(*spaced), title=Text(title), subtitle=f"up {_duration(frame.stats.uptime_s)}")


def _waiting(load: Load) -> Text:
    """Before the first worker: what is waited for, above those that were asked."""
    waiting = "1 request waits" if load.queued == 1 else f"{load.queued:,} requests wait"
    asked = "none of these serves" if load.workers else "the names of --workers have no address"
    return Text(f"no worker yet, {waiting}: {asked}", style="bold yellow")


def _throughput(frame: Frame) -> Table:
    stats, load = frame.stats, frame.stats.load
    table = Table.grid(padding=(0, 2))
    table.add_row("output", f"{frame.generation_rate:,.0f} tokens/s", Text(_sparks(frame.generation_rates), "green"))
    table.add_row("prompts", f"{frame.prompt_rate:,.0f} tokens/s", f"{frame.request_rate:,.1f} requests/s")
    table.add_row("running", f"{load.running} of {load.max_running}", f"{load.queued} queued")
    table.add_row("ended", f"{stats.requests:,}", f"{stats.preemptions:,} preempted, {stats.replays:,} replayed")
    return table


def _sparks(values: Sequence[float]) -> str:
    most = max(values) or 1.0
    return "".join(_BLOCKS[round(value / most * (len(_BLOCKS) - 1))] for value in values)


def _workers(workers: Sequence[WorkerLoad]) -> list[Table]:
    """Those that serve, and those that don't: the reason of each gets what is left of its one line."""
    serving, others = _table("worker", "", "running", "K/V in use", ""), _table("worker", "", "why")
    for worker in workers:
        if not worker.connected:
            state = Text("refused" if worker.refused else "away", "bold red")
            problem = " ".join(worker.problem.split())
            others.add_row(Text(worker.endpoint), state, Text(problem, no_wrap=True, overflow="ellipsis"))
            continue
        used = worker.total_blocks - worker.free_blocks
        share = used / worker.total_blocks if worker.total_blocks else 0.0
        bar = ProgressBar(total=1.0, completed=share, width=20)
        state = Text("draining", "yellow") if worker.draining else Text("connected", "green")
        detail = f"{share:.0%} of {worker.total_blocks:,} blocks"
        serving.add_row(Text(worker.endpoint), state, f"{worker.running}", bar, detail)
    return [table for table in (serving, others) if table.row_count]


def _latencies(requests: Sequence[RequestStats]) -> Table:
    """Of requests that ended well: the others say nothing about speed."""
    ended = [request for request in requests if request.outcome in ("stop", "length")]
    table = _table(f"latest {len(ended)} finished", "p50", "p90", "p99", right_from=1)
    further = [request for request in ended if request.completion_tokens > 1]
    rows = (
        ("to the first token", [request.first_token_ms for request in ended]),
        ("per further token", [_per_token(request) for request in further]),
        ("whole request", [request.total_ms for request in ended]),
    )
    for name, values in rows:
        if values:
            table.add_row(name, *(_milliseconds(percentile(values, share)) for share in (50, 90, 99)))
    return table


def _per_token(request: RequestStats) -> float:
    return (request.total_ms - request.first_token_ms) / (request.completion_tokens - 1)


def percentile(values: Sequence[float], share: int) -> float:
    """Linear between the nearest two values, as numpy.percentile."""
    return quantiles(values, n=100, method="inclusive")[share - 1] if len(values) > 1 else values[0]


def _latest(requests: Sequence[RequestStats]) -> Table:
    table = _table("request", "ended", "", "prompt", "cached", "output", "first token", "whole", right_from=3)
    for request in requests:
        ended_well = request.outcome in ("stop", "length")
        table.add_row(
            Text(request.request_id[:16]),
            f"{_duration(request.age_s)} ago",
            Text(request.outcome, "" if ended_well else "yellow"),
            *(f"{count:,}" for count in (request.prompt_tokens, request.cached_tokens, request.completion_tokens)),
            _milliseconds(request.first_token_ms) if request.completion_tokens else "",
            _milliseconds(request.total_ms),
        )
    return table


def _table(*columns: str, right_from: int | None = None) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if right_from is not None and number >= right_from else "left")
    return table


def _milliseconds(value: float) -> str:
    return f"{value:,.1f} ms" if value < 1000 else f"{value / 1000:,.2f} s"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}" if minutes else f"{rest} s"
