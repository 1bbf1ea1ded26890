"""Pictures of benchmark points."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw(title: str, points: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Bars of throughput, time to first token and gap between messages, one group a point, as PNG."""
    import matplotlib

    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot

    panels = (
        ("output tokens/s", ("tokens_per_second",)),
        ("time to first token, ms", ("ttft_p50_ms", "ttft_p99_ms")),
        ("gap between messages, ms", ("gap_p50_ms", "gap_p99_ms")),
    )
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(max(6, 1.2 * len(points)), 9), layout="constrained")
    for axis, (label, names) in zip(axes, panels, strict=True):
        for number, name in enumerate(names):
            places = [place + 0.8 / len(names) * (number + 0.5) - 0.4 for place in range(len(points))]
            bars = axis.bar(places, [point[name] for point in points], 0.8 / len(names), label=name.rsplit("_", 1)[0])
            axis.bar_label(bars, fmt="{:,.4g}", fontsize=8)
        axis.set_ylabel(label)
        axis.set_xticks(range(len(points)), [point["what"] for point in points], fontsize=8)
        if len(names) > 1:
            axis.legend()
    figure.suptitle(title)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
