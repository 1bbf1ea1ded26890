"""What a grammar costs: `python -m bench.constrain [--model tiny] [--streams 16]`.

The same number of streams, all free, half of them constrained, all constrained, through services of their own. Free
streams run steps ahead; a constrained one waits for the mask of each token, which goes by way of a frontend.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.services import services
from tandem import AsyncClient
from tandem.models import model_folder

PROMPT = "It is a truth universally acknowledged"
LANGUAGES: dict[str, dict[str, Any]] = {
    "regex": {"regex": r"([a-z ,.]|\n)*"},
    "JSON schema": {"json_schema": {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 1000}},
}


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one kind of stream."""

    streams: int
    tokens_per_second: float
    """Of all of them together."""
    gap_ms: float
    """Mean time from a token of a stream to its next."""


def main(
    model: Annotated[str, typer.Option(help="model folder, or tiny or tiny-moe")] = "tiny",
    streams: Annotated[int, typer.Option(help="streams at a time")] = 16,
    tokens: Annotated[int, typer.Option(help="tokens of each")] = 200,
) -> None:
    """Prints one row for each mix."""
    table = Table(title=f"{model}: {streams} streams of {tokens} tokens")
    for name in ("streams", "free: tokens/s", "free: gap, ms", "constrained: tokens/s", "constrained: gap, ms"):
        table.add_column(name, justify="left" if name == "streams" else "right")
    with services(model_folder(model), "auto", frontends=1) as endpoint:
        asyncio.run(_measure(endpoint, 2, 2, LANGUAGES["regex"], tokens=20))
        table.add_row("all free", *_cells(*asyncio.run(_measure(endpoint, streams, 0, {}, tokens))))
        for name, language in LANGUAGES.items():
            for constrained in (streams // 2, streams):
                speeds = asyncio.run(_measure(endpoint, streams - constrained, constrained, language, tokens))
                table.add_row(f"{constrained} by {name}", *_cells(*speeds))
    Console(width=110).print(table)


async def _measure(
    endpoint: str, free: int, constrained: int, language: dict[str, Any], tokens: int
) -> tuple[Speed | None, Speed | None]:
    async with AsyncClient(endpoint) as client:
        kinds = [{"ignore_eos": True}] * free + [{**language, "min_tokens": tokens}] * constrained
        times = await asyncio.gather(*(_stream(client, seed, tokens, kind) for seed, kind in enumerate(kinds)))
    return _speed(times[:free]), _speed(times[free:])


async def _stream(client: AsyncClient, seed: int, tokens: int, kind: dict[str, Any]) -> tuple[int, float]:
    """Tokens after the first message, and seconds from it to the last."""
    count, first, last = 0, 0.0, 0.0
    stream = client.generate(PROMPT, seed=seed, temperature=1.0, max_tokens=tokens, **kind)
    async for delta in stream:
        last = time.perf_counter()
        if first:
            count += len(delta.token_ids)
        first = first or last
    return count, last - first


def _speed(times: list[tuple[int, float]]) -> Speed | None:
    if not times:
        return None
    gaps = sum(seconds for _, seconds in times) / sum(count for count, _ in times)
    return Speed(len(times), len(times) / gaps, gaps * 1e3)


def _cells(*speeds: Speed | None) -> list[str]:
    cells: list[str] = []
    for speed in speeds:
        cells += [f"{speed.tokens_per_second:,.0f}", f"{speed.gap_ms:.1f}"] if speed else ["", ""]
    return cells


if __name__ == "__main__":
    typer.run(main)
