"""A client whose streams never end: `python -m tests.net.client ENDPOINT`, until its standard input does.

Each stream is asked for again and again, and compared with the first answer. Prints "ready" when it has all of these,
"moving" for each line of input, when every stream has had another message since, and at the end what it saw as JSON:
`requests`, `wrong`, and `pauses`: begins and ends by the monotonic clock.
"""

import asyncio
import json
import sys
import time
from typing import Any

from tandem import AsyncClient, Delta
from tests.patience import PATIENCE_S

LONG_S = 0.15
"""Shorter pauses are not told."""
STREAMS: list[dict[str, Any]] = [
    {"temperature": number % 2 * 0.8, "seed": number, "max_tokens": 60, "ignore_eos": True} for number in range(6)
]


class Watcher:
    """Reads the streams."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.requests = 0
        self.wrong: list[str] = []
        self.pauses: list[tuple[float, float]] = []
        self._expected: dict[int, Any] = {}
        self._messages = [0] * len(STREAMS)

    async def ask(self, number: int) -> None:
        """One stream, to its end."""
        deltas: list[Delta] = []
        last = time.monotonic()
        async for delta in self.client.generate(f"It is a truth {number % 3}", **STREAMS[number]):
            now = time.monotonic()
            self._messages[number] += 1
            if now - last > LONG_S:
                self.pauses.append((last, now))
            last = now
            deltas.append(delta)
        ids = [token for delta in deltas for token in delta.token_ids]
        seen = ids, "".join(delta.text for delta in deltas), str(deltas[-1].finish)
        if self._expected.setdefault(number, seen) != seen:
            self.wrong.append(f"stream {number}: {seen}, not {self._expected[number]}")
        self.requests += 1

    async def moving(self) -> None:
        """Waits until every stream has had another message; one that has failed gets none."""
        before = self._messages.copy()
        while not self.wrong and any(now == then for now, then in zip(self._messages, before, strict=True)):
            await asyncio.sleep(0.01)

    async def ask_on(self, number: int, end: asyncio.Event) -> None:
        """Until told to end."""
        while not end.is_set():
            try:
                await self.ask(number)
            except Exception as error:
                self.wrong.append(f"stream {number}: {error!r}")
                return


async def main(endpoint: str) -> None:
    """Prints what it saw."""
    end = asyncio.Event()
    async with AsyncClient(endpoint) as client:
        watcher, numbers = Watcher(client), range(len(STREAMS))
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*map(watcher.ask, numbers))
        print("ready", flush=True)
        asking = asyncio.gather(*(watcher.ask_on(number, end) for number in numbers))
        while await asyncio.to_thread(sys.stdin.readline):
            async with asyncio.timeout(PATIENCE_S):
                await watcher.moving()
            print("moving", flush=True)
        end.set()
        await asking
    print(json.dumps({"requests": watcher.requests, "wrong": watcher.wrong, "pauses": watcher.pauses}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
