"""What time does to the queue: who has waited too long, and when who is refused should come again.

Told the time, in seconds on the caller's clock; has none of its own. Knows of sequences nothing but their keys.
"""

import math
from collections import deque

AVERAGED_S = 10.0
"""Ends are averaged over about so long."""
UNKNOWN_S = 1.0
"""Between two places in the queue, while nothing has ended yet."""
SOONEST_S, LATEST_S = 0.1, 60.0
"""Bounds of the hint."""


class QueueClock:
    """One queue's."""

    def __init__(self, max_queue_time: float | None) -> None:
        """`max_queue_time`: seconds that a sequence may wait for its first step; None: for ever."""
        self._most = math.inf if max_queue_time is None else max_queue_time
        self._waiting: deque[tuple[float, int]] = deque()
        """(when it has waited for too long, key), the first to be so first; some wait no more."""
        self._ends = 0.0
        """Ended sequences; each counts for less as time goes by."""
        self._counted = 0.0
        """When that was true."""
        self._next_place = 0.0
        """When the place is free that the last one refused was told of."""

    def ended(self, now: float) -> None:
        """A sequence is over: somebody leaves the queue for its place."""
        self._age(now)
        self._ends += 1.0

    def retry_after_ms(self, now: float) -> int:
        """When one who is refused should come again: each is told of a place of its own, as fast as they get free, so
        that they don't all come back at once."""
        self._age(now)
        interval = AVERAGED_S / self._ends if self._ends > AVERAGED_S / LATEST_S else UNKNOWN_S
        self._next_place = min(max(now, self._next_place) + interval, now + LATEST_S)
        return round(max(self._next_place - now, SOONEST_S) * 1e3)

    def _age(self, now: float) -> None:
        self._ends *= math.exp((self._counted - now) / AVERAGED_S)
        self._counted = now

    def submitted(self, key: int, now: float) -> None:
        """A sequence begins to wait."""
        if self._most < math.inf:
            self._waiting.append((now + self._most, key))

    def late(self, now: float) -> list[int]:
        """Keys, each told once, of those that would have waited for too long if they waited still."""
        keys = []
        while self._waiting and self._waiting[0][0] <= now:
            keys.append(self._waiting.popleft()[1])
        return keys
