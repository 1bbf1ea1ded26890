"""A process of streaming clients: `python -m bench.work_client ENDPOINT START OUTPUT < ITEMS`.

Reads requests as JSON, [[prompt, output length, arrival], ...], begins each `arrival` seconds after START on the system
clock and writes when their messages came: `arrival`, `first` and `last` of each stream, `gaps` between messages,
`tokens` of each stream. Prompts are folded into the model's vocabulary.
"""

import asyncio
import json
import sys
import time

import numpy as np
import uvloop

from bench.work import TEMPERATURE
from tandem.async_client import AsyncClient


async def main(endpoint: str, start: float, output: str) -> None:
    """Returns when every stream has ended."""
    client = AsyncClient(endpoint)
    size = (await client.model_info()).vocabulary_size
    items = [
        ([token % size for token in prompt], length, start + wait) for prompt, length, wait in json.load(sys.stdin)
    ]
    gaps: list[float] = []
    streams = await asyncio.gather(*(_read(client, *item, gaps) for item in items))
    arrival, first, last, tokens = (np.array(column) for column in zip(*streams, strict=True))
    np.savez(output, arrival=arrival, first=first, last=last, tokens=tokens, gaps=np.array(gaps))
    await client.close()


async def _read(
    client: AsyncClient, prompt: list[int], length: int, arrival: float, gaps: list[float]
) -> tuple[float, float, float, int]:
    await asyncio.sleep(max(arrival - time.time(), 0.0))
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
    return arrival, first, previous, tokens


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], float(sys.argv[2]), sys.argv[3]))
