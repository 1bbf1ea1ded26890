"""What serving costs: `python -m bench.compare [--model NAME] [--json FILE]`.

The same work in one process (bench.offline) and through the services (bench.serving), with the same settings, each in
processes of its own, one after the other.
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.work import MIXED, MODEL_HELP, RATE


@dataclass(frozen=True, slots=True)
class Pair:
    """One point both ways."""

    what: str
    unit: str
    one_process: float
    services: float

    @property
    def longer(self) -> float:
        """How much longer it takes through the services: 0.03 is three percent."""
        ratio = self.services / self.one_process
        return (1 / ratio if self.unit == RATE else ratio) - 1


def main(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "qwen3-0.6b",
    batches: Annotated[str, typer.Option(help="batch sizes of the decode points")] = "1,8,64,256",
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="as of tandem worker")] = None,
    requests: Annotated[int, typer.Option(help="requests of the mixed work, at most 256")] = 256,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the pairs here")] = None,
) -> None:
    """Prints the tables of both, then one of the pairs."""
    options = ["--model", model, "--batches", batches, "--requests", str(requests)]
    if max_num_batched_tokens is not None:
        options += ["--max-num-batched-tokens", str(max_num_batched_tokens)]
    one_process = {point["what"]: point for point in _points("bench.offline", options)}
    pairs = [_pair(one_process[point["what"]], point) for point in _points("bench.serving", options)]
    _print(model, pairs)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(pair) for pair in pairs], indent=2) + "\n", encoding="utf-8")


def _points(module: str, options: list[str]) -> list[dict[str, Any]]:
    with TemporaryDirectory() as scratch:
        file = Path(scratch) / "points.json"
        subprocess.run([sys.executable, "-m", module, *options, "--json", str(file)], check=True)
        points: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
        return points


def _pair(one_process: dict[str, Any], services: dict[str, Any]) -> Pair:
    what, unit = one_process["what"], one_process["unit"]
    column = "decode_ms" if unit != RATE else "tokens_per_second" if what == MIXED else "prompt_tokens_per_second"
    return Pair(what, unit, one_process["value"], services[column])


def _print(model: str, pairs: list[Pair]) -> None:
    table = Table(title=f"{model}: what serving costs")
    for name in ("what", "unit", "in one process", "through the services", "longer by"):
        table.add_column(name, justify="left" if name in ("what", "unit") else "right")
    for pair in pairs:
        table.add_row(pair.what, pair.unit, f"{pair.one_process:,}", f"{pair.services:,}", f"{pair.longer:+.1%}")
    Console(width=110).print(table)


if __name__ == "__main__":
    typer.run(main)
