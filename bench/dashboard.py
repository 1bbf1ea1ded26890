"""Draws deploy/grafana/tandem.json from a Prometheus, without Grafana: `python -m bench.dashboard URL PNG`."""

import json
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

DASHBOARD = Path(__file__).parents[1] / "deploy" / "grafana" / "tandem.json"
COLUMNS = 4
_FACTORS = {"bytes": (1 << 20, "MiB"), "percentunit": (0.01, "%"), "s": (1e-3, "ms")}

matplotlib.use("Agg")


def main(
    url: Annotated[str, typer.Argument(help="Of the Prometheus, for instance http://127.0.0.1:9090.")],
    png: Annotated[Path, typer.Argument(help="Where the picture goes.")],
    seconds: Annotated[float, typer.Option(help="How far it looks back.")] = 120.0,
    window: Annotated[str, typer.Option(help="In place of Grafana's $__rate_interval.")] = "10s",
) -> None:
    """One plot per panel."""
    panels = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
    rows = -(-len(panels) // COLUMNS)
    figure, axes = plt.subplots(rows, COLUMNS, figsize=(4 * COLUMNS, 2.3 * rows), layout="constrained")
    for panel, plot in zip(panels, axes.flat, strict=False):
        _draw(plot, panel, url, seconds, window)
    for plot in axes.flat[len(panels) :]:
        plot.set_axis_off()
    figure.savefig(png, dpi=75)


def _draw(plot: Axes, panel: dict[str, Any], url: str, seconds: float, window: str) -> None:
    factor, unit = _FACTORS.get(panel["fieldConfig"]["defaults"]["unit"], (1.0, ""))
    now = time.time()
    for target in panel["targets"]:
        expression = target["expr"].replace("$__rate_interval", window)
        for series in _range(url, expression, now - seconds, now):
            times, values = zip(*((at - now, float(value) / factor) for at, value in series["values"]), strict=True)
            plot.plot(times, values, linewidth=1, label=_legend(target["legendFormat"], series["metric"]))
    plot.set_title(f"{panel['title']}, {unit}" if unit else panel["title"], fontsize=9)
    plot.set_ylim(bottom=0)
    plot.tick_params(labelsize=7)
    plot.legend(fontsize=6, loc="best", framealpha=0.6)


def _range(url: str, expression: str, start: float, end: float) -> list[dict[str, Any]]:
    parameters = {"query": expression, "start": start, "end": end, "step": "1s"}
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{urllib.parse.urlencode(parameters)}") as answer:
        result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return result


def _legend(text: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        text = text.replace("{{" + name + "}}", value)
    return text


if __name__ == "__main__":
    typer.run(main)
