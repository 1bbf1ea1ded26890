"""What a benchmark leaves behind: a table, JSON, and a picture."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from shared.errors import StartupError
from tandem.bench.measure import Floats, Measured, Point

_TIME_BINS = 60


def print_table(title: str, measured: Sequence[Measured], note: str) -> None:
    """One row a point, and below what was not measured."""
    table = Table(title=title)
    for name in Point.__dataclass_fields__:
        is_name = name == "what"
        table.add_column(name.replace("_", " "), justify="left" if is_name else "right", no_wrap=is_name)
    for one in measured:
        table.add_row(*(value if isinstance(value, str) else f"{value:,}" for value in asdict(one.point).values()))
    console = Console(width=130)
    console.print(table)
    console.print(note)
    for one in measured:
        for error in dict.fromkeys(one.errors):
            console.print(f"{one.point.what}: {one.errors.count(error)} failed: {error}", markup=False, soft_wrap=True)


def write_json(measured: Sequence[Measured], file: Path) -> None:
    """A list of points."""
    file.write_text(json.dumps([asdict(one.point) for one in measured], indent=2) + "\n", encoding="utf-8")


def require_plots() -> None:
    """Raises StartupError where nothing can be drawn: before a long run, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise StartupError("--plot needs matplotlib: pip install 'tandem-serve[plot]'") from None


def draw(title: str, measured: Sequence[Measured], file: Path) -> None:
    """Time to first token and gaps as cumulative distributions, throughput over time; one line a point, as PNG."""
    import matplotlib

    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot

    figure, (ttft, gaps, throughput) = pyplot.subplots(3, 1, figsize=(8, 10), layout="constrained")
    for number, one in enumerate(measured):
        line = {"label": one.point.what, "color": f"C{number}"}  # the same on every axis, where it is on any
        ttft.ecdf(one.ttft_ms, **line)
        if one.gaps_ms.size:
            gaps.ecdf(np.maximum(one.gaps_ms, 1e-3), **line)
        throughput.step(*_rates(one.times_s, one.counts), where="post", **line)
    for axis, name in ((ttft, "time to first token, ms"), (gaps, "gap between messages of a stream, ms")):
        axis.set(xlabel=name, ylabel="share", xscale="log", ylim=(0, 1))
    throughput.set(xlabel="seconds since the start", ylabel="output tokens/s", ylim=(0, None))
    for axis in (ttft, gaps, throughput):
        axis.grid(alpha=0.3)
    ttft.legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _rates(times_s: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """Left edges of bins of time, and the tokens per second in each."""
    tokens, edges = np.histogram(times_s, bins=_TIME_BINS, range=(0.0, float(times_s.max())), weights=counts)
    return edges[:-1], tokens / (edges[1] - edges[0])
