"""A process of streaming clients: `python -m tandem.bench.client ENDPOINT SECURITY START CONCURRENCY OUTPUT < ITEMS`.

Connects, reads requests as JSON, [[prompt, output length, arrival], ...], and creates OUTPUT: it is ready. Once the
file START is there, which holds a time of the system clock, it begins each request `arrival` seconds after that, at
most CONCURRENCY at a time, and writes when their messages came; a byte on standard output for each that has ended.
ENDPOINT may be several with commas; SECURITY is a ClientSecurity as JSON. Prompts are folded into the model's
vocabulary.

OUTPUT holds arrays: `arrival`, `late` (how long after it the request was sent), `first`, `last` (system clock),
`tokens`, `later` (those after its first message) and `prompts` (tokens) of each stream that ended well, `gaps` between
messages of a stream, `times` and `counts` of all messages' tokens, `errors` of the streams that failed.
"""

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import uvloop

from shared.errors import TandemError
from shared.security import ClientSecurity
from shared.settings import from_json
from tandem.async_client import AsyncClient
from tandem.bench.work import TEMPERATURE

_POLL_S = 0.005
_STREAM = ("arrival", "late", "first", "last", "tokens", "later", "prompts")


@dataclass(slots=True)
class Seen:
    """What all streams have seen so far."""

    streams: list[tuple[float, float, float, float, int, int, int]] = field(default_factory=list)
    """(arrival, late, first, last, tokens, later tokens, prompt tokens)"""
    gaps: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def save(self, output: str) -> None:
        """Writes the arrays."""
        columns = np.array(self.streams, dtype=np.float64).reshape(-1, 7).T
        streams = dict(zip(_STREAM, columns, strict=True))
        others = {name: np.array(getattr(self, name), dtype=np.float64) for name in ("gaps", "times", "counts")}
        np.savez(output, errors=np.array(self.errors, dtype=np.str_), **streams, **others)  # type: ignore[arg-type]


async def main(endpoint: str, security: ClientSecurity, start_file: Path, concurrency: int, output: str) -> None:
    """Returns when every stream has ended."""
    # Without trying again: a benchmark that hides a loss or a refusal measures something else.
    async with AsyncClient(endpoint.split(","), security=security, resume_timeout=0, queue_timeout=0) as client:
        size = (await client.model_info()).vocabulary_size
        seen, room = Seen(), asyncio.Semaphore(concurrency)
        offered = [([token % size for token in prompt], length, wait) for prompt, length, wait in json.load(sys.stdin)]
        start = await asyncio.to_thread(_until_told, start_file, Path(output))
        items = [(prompt, length, start + wait) for prompt, length, wait in offered]
        await asyncio.gather(*(_one(client, *item, seen, room) for item in items))
        seen.save(output)


def _until_told(start_file: Path, output: Path) -> float:
    """Says that this process is ready; when it starts."""
    output.touch()
    while not start_file.exists():
        time.sleep(_POLL_S)
    return float(start_file.read_text(encoding="utf-8"))


async def _one(
    client: AsyncClient, prompt: list[int], length: int, arrival: float, seen: Seen, room: asyncio.Semaphore
) -> None:
    await asyncio.sleep(max(arrival - time.time(), 0.0))
    waits = room.locked()
    async with room:
        try:
            # One that had to wait for room arrives when there is some.
            await _read(client, prompt, length, time.time() if waits else arrival, seen)
        except TandemError as error:
            seen.errors.append(f"{type(error).__name__}: {error}")
    print(end=".", flush=True)


async def _read(client: AsyncClient, prompt: list[int], length: int, arrival: float, seen: Seen) -> None:
    late = time.time() - arrival
    first = previous = 0.0
    tokens = later = 0
    stream = client.generate(
        prompt, max_tokens=length, temperature=TEMPERATURE, top_k=0, top_p=1.0, min_p=0.0, ignore_eos=True
    )
    async for delta in stream:
        now = time.time()
        if not tokens:
            first = now
        else:
            seen.gaps.append(now - previous)
            later += len(delta.token_ids)
        previous = now
        tokens += len(delta.token_ids)
        seen.times.append(now)
        seen.counts.append(len(delta.token_ids))
    seen.streams.append((arrival, late, first, previous, tokens, later, len(prompt)))


if __name__ == "__main__":
    _, endpoint, security, start_file, concurrency, output = sys.argv
    uvloop.run(main(endpoint, from_json(ClientSecurity, security), Path(start_file), int(concurrency), output))
