"""Offers requests from several client processes and turns what they saw into numbers."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shared.errors import RequestFailed
from shared.security import PLAIN, ClientSecurity
from shared.settings import to_json
from tandem.bench.work import Item

Floats: TypeAlias = NDArray[np.float64]

_LEAD_S = 0.1  # from when all clients are ready
_POLL_S = 0.01
_LATE_S = 0.02  # what a client that starts in time keeps
_CLIENT_FAILED = "a client process failed: see its message above"
_COLUMNS = ("arrival", "late", "first", "last", "tokens", "later", "prompts", "gaps", "times", "counts")


@dataclass(frozen=True, slots=True)
class Goals:
    """What a good request keeps, milliseconds."""

    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True, slots=True)
class Point:
    """One batch of requests. Rates are over the time from the start to the last token."""

    what: str
    failed: int
    """Requests that ended with an error; they are in no other number."""
    prompt_tokens_per_second: int
    tokens_per_second: int
    """Of output."""
    goodput: float
    """Requests a second whose first token and whose mean time per further token were within the goals."""
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    tpot_ms: float
    """Mean of (last - first) / tokens after the first message, with what later streams' prompts take, over the streams
    that have such; 0 where none has."""
    decode_ms: float
    """From when every stream had begun to the end, per further token; 0 where streams differ in length, or the last one
    to begin had all of its tokens at once."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A point and what it was computed from."""

    point: Point
    ttft_ms: Floats
    """[num_streams]"""
    gaps_ms: Floats
    """[num_messages - num_streams]: between messages of a stream."""
    times_s: Floats
    """[num_messages]: since the start."""
    counts: Floats
    """[num_messages]: tokens of each."""
    errors: tuple[str, ...]
    """Of the streams that failed."""


def start_client(
    endpoint: str,
    start: Path,
    output: Path,
    items: list[Item],
    concurrency: int,
    progress: int = subprocess.DEVNULL,
    security: ClientSecurity = PLAIN,
) -> "subprocess.Popen[bytes]":
    """A process of tandem.bench.client with these requests, which waits for the file `start`; `progress` is its
    standard output."""
    arguments = [endpoint, to_json(security), str(start), str(concurrency), str(output)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tandem.bench.client", *arguments], stdin=subprocess.PIPE, stdout=progress
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps([(item.prompt, item.output_length, item.arrival) for item in items]).encode())
    process.stdin.close()
    return process


def measure(
    endpoint: str,
    what: str,
    items: list[Item],
    clients: int,
    goals: Goals,
    concurrency: int | None = None,
    progress: Callable[[int], None] = lambda ended: None,
    security: ClientSecurity = PLAIN,
) -> Measured:
    """Offers the requests from so many processes, at most `concurrency` at a time over all of them.

    `progress` is told of requests that have ended. Raises RequestFailed where a client process fails or every request
    does.
    """
    clients = min(clients, len(items), concurrency or len(items))
    with TemporaryDirectory() as scratch:
        start_file = Path(scratch) / "start"
        outputs = [Path(scratch) / f"{number}.npz" for number in range(clients)]
        reading, writing = os.pipe()
        readers = [
            start_client(
                endpoint,
                start_file,
                output,
                items[number::clients],
                _share(concurrency, clients, number),
                writing,
                security,
            )
            for number, output in enumerate(outputs)
        ]
        os.close(writing)
        try:
            with open(reading, "rb", buffering=0) as ended:
                start = _start_all(readers, outputs, start_file)
                while dots := ended.read(4096):
                    progress(len(dots))
            if sum(abs(reader.wait()) for reader in readers):
                raise RequestFailed(_CLIENT_FAILED)
        finally:
            for reader in readers:
                reader.kill()
        return _measured(what, start, goals, [np.load(output) for output in outputs])


def _start_all(readers: "list[subprocess.Popen[bytes]]", outputs: list[Path], start_file: Path) -> float:
    """When they start, which they are told once all are ready. Raises RequestFailed where one ends before."""
    while not all(output.exists() for output in outputs):
        if any(reader.poll() is not None for reader in readers):
            raise RequestFailed(_CLIENT_FAILED)
        time.sleep(_POLL_S)
    start = time.time() + _LEAD_S
    written = start_file.with_suffix(".new")
    written.write_text(str(start), encoding="utf-8")
    written.rename(start_file)
    return start


def _share(concurrency: int | None, clients: int, number: int) -> int:
    """Of one process: the shares add up."""
    return 1 << 30 if concurrency is None else concurrency // clients + (number < concurrency % clients)


def _measured(what: str, start: float, goals: Goals, seen: list[Any]) -> Measured:
    columns = {name: np.concatenate([file[name] for file in seen]) for name in _COLUMNS}
    arrival, late, first, last, tokens, later, prompts, gaps, times, counts = columns.values()
    errors = tuple(str(error) for file in seen for error in file["errors"])
    if not tokens.size:
        raise RequestFailed(f"every request failed, the first with {errors[0]}")
    if late.max() > _LATE_S:
        print(f"{what}: a request was sent {late.max() * 1e3:.0f} ms after its arrival", file=sys.stderr)
    ttft, tpot, seconds = (first - arrival) * 1e3, (last - first) / np.maximum(later, 1) * 1e3, last.max() - start
    good = (ttft <= goals.ttft_ms) & (tpot <= goals.tpot_ms)
    point = Point(
        what=what,
        failed=len(errors),
        prompt_tokens_per_second=round(float(prompts.sum() / seconds)),
        tokens_per_second=round(float(tokens.sum() / seconds)),
        goodput=round(float(good.sum() / seconds), 2),
        ttft_p50_ms=_percentile(ttft, 50),
        ttft_p99_ms=_percentile(ttft, 99),
        gap_p50_ms=_percentile(gaps * 1e3, 50),
        gap_p99_ms=_percentile(gaps * 1e3, 99),
        tpot_ms=round(float(tpot[later > 0].mean()), 3) if later.any() else 0.0,
        decode_ms=_decode_ms(first, last, tokens, later),
    )
    return Measured(point, ttft, gaps * 1e3, times - start, counts, errors)


def _decode_ms(first: Floats, last: Floats, tokens: Floats, later: Floats) -> float:
    """See Point. A message that was held up brings many tokens: those of the last stream to begin count from then."""
    remaining = later[first.argmax()]
    equal = tokens.min() == tokens.max() and remaining > 0
    return round(float((last.max() - first.max()) / remaining * 1e3), 3) if equal else 0.0


def _percentile(values: Floats, share: int) -> float:
    return round(float(np.percentile(values, share)), 2) if len(values) else 0.0
