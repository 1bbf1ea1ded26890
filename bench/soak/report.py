"""What a soak gave: a verdict, a table, JSON, and a picture of the throughput with the faults in it."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.soak.clients import Tally
from bench.soak.faults import Struck
from bench.soak.memory import Growth

MOST_SHOWN = 5


@dataclass(slots=True)
class Report:
    """Of one run."""

    seed: int
    seconds: float
    every: float
    """Seconds from one fault to the next, in the mean."""
    clients: int
    tally: Tally
    faults: list[Struck] = field(default_factory=list)
    ended_per_second: list[int] = field(default_factory=list)
    """Requests that ended in each second."""
    restarts: dict[str, int] = field(default_factory=dict)
    """Starts of each process after its first, by those who keep them."""
    replays: int = 0
    preemptions: int = 0
    growths: list[Growth] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """What was not back to nothing at the end."""

    def problems(self) -> list[str]:
        """Every way in which it was not as it must be."""
        tally = self.tally
        found = [f"lost: {each}" for each in tally.lost] + [f"wrong: {each}" for each in tally.wrong] + self.left
        if tally.started != tally.ended:
            found.append(f"{tally.started} requests began, {tally.ended} ended")
        found += [f"memory grew: {growth}" for growth in self.growths if not growth.is_flat]
        return found

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {**asdict(self), "problems": self.problems()}


def show(report: Report) -> None:
    """Prints tables."""
    tally, console = report.tally, Console(width=110)
    table = Table(title=f"Soak: seed {report.seed}, {report.seconds:,.0f} s, {report.clients} clients")
    table.add_column("what")
    table.add_column("how many", justify="right")
    rows = {
        "requests": tally.ended,
        **{f"  {end}": count for end, count in sorted(tally.ends.items())},
        "requests a second": round(tally.ended / report.seconds, 1),
        "output tokens": tally.tokens,
        "faults": len(report.faults),
        "processes started again": sum(report.restarts.values()),
        "sequences computed again since the core's last start": report.replays,
        "times that a request was asked again, accepted by nobody before": tally.asked_again,
        "longest wait for a message, s": round(tally.longest_pause_s, 1),
        "requests lost": len(tally.lost),
        "tokens wrong": tally.wrong_tokens,
        "problems": len(report.problems()),
    }
    for name, value in rows.items():
        table.add_row(name, f"{value:,}")
    console.print(table)
    counts = Counter(fault.name for fault in report.faults)
    console.print("faults: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    for growth in report.growths[:MOST_SHOWN]:
        files = f"{growth.warm_files} to {growth.last_files} open files"
        mib = f"{growth.warm_mib:,.0f} to {growth.last_mib:,.0f} MiB"
        console.print(f"{growth.role}: {mib}, {files} in {growth.seconds:,.0f} s")
    for problem in report.problems():
        console.print(problem[:1000], markup=False)


def write(report: Report, json_file: Path | None, plot: Path | None) -> None:
    """Where they were asked for."""
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        _draw(report, plot)


def _draw(report: Report, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = sorted({fault.name for fault in report.faults}, reverse=True)
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(14, 8), layout="constrained")
    above.step(range(len(report.ended_per_second)), report.ended_per_second, where="post", linewidth=0.8, color="0.3")
    above.set(ylabel="requests that ended in a second", ylim=(0, None))
    below.eventplot([[fault.at_s for fault in report.faults if fault.name == name] for name in names], linelengths=0.8)
    below.set(yticks=range(len(names)), yticklabels=names, xlabel="seconds", xlim=(0, len(report.ended_per_second)))
    figure.savefig(path, dpi=110)
    plt.close(figure)
