"""A process of streaming clients: `python -m bench.work_client ENDPOINT START OUTPUT < ITEMS`.

Reads requests as JSON, [[prompt, output length], ...], begins them all at START (seconds of the system's clock) and
writes when their messages came: `first` and `last` of each stream, `gaps` between messages, `tokens` of each stream.
"""

import asyncio
import json
import sys
import time

import numpy as np
import uvloop

from bench.work import TEMPERATURE
from tandem.client import AsyncClient


async def main(endpoint: str, start: float, output: str) -> None:
    """Returns when every stream has ended."""
    items = json.load(sys.stdin)
    client = AsyncClient(endpoint)
    await client.model_info()
    await asyncio.sleep(max(start - time.time(), 0.0))
    gaps: list[float] = []
    streams = await asyncio.gather(*(_read(client, prompt, length, gaps) for prompt, length in items))
    first, last, tokens = (np.array(column) for column in zip(*streams, strict=True))
    np.savez(output, first=first, last=last, tokens=tokens, gaps=np.array(gaps))
    await client.close()


async def _read(client: AsyncClient, prompt: list[int], length: int, gaps: list[float]) -> tuple[float, float, int]:
    first = previous = 0.0
    tokens = 0
    stream = client.generate(
        prompt, max_tokens=length, temperature=TEMPERATURE, top_k=0, top_p=1.0, min_p=0.0, ignore_eos=True
    )
    async for delta in stream:
        now = time.time()
        if not tokens:
            first = now
        else:
            gaps.append(now - previous)
        previous = now
        tokens += len(delta.token_ids)
    return first, previous, tokens


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], float(sys.argv[2]), sys.argv[3]))
