"""What time does to the queue: who has waited too long, and when who is refused should come again.

Told the time, in seconds on the caller's clock; has none of its own. Knows of sequences nothing but their keys.
"""

import math
from collections import deque

AVERAGED_S = 10.0
"""The rate of ends is averaged over about so long."""
UNKNOWN_S = 1.0
"""Between two ends, before any: it counts as one that was seen."""
SOONEST_S, LATEST_S = 0.1, 60.0
"""Bounds of the hint."""


class QueueClock:
    """One queue's."""

    def __init__(self, max_queue_time: float | None) -> None:
        """`max_queue_time`: seconds that a sequence may wait for its first step; None: for ever."""
        self._most = math.inf if max_queue_time is None else max_queue_time
        self._waiting: deque[tuple[float, int]] = deque()
        """(when it has waited for too long, key), the first to be so first; some wait no more."""
        self._live = 0
        """Sequences that wait or run."""
        self._ends, self._seconds = 1.0, UNKNOWN_S
        """Ended sequences, and the time that they took, without that in which none was live; both count for less as
        time goes by."""
        self._counted: float | None = None
        """When that was true; None before the first end: what a start takes says nothing of the rate."""
        self._next_place = 0.0
        """When the place is free that the last one refused was told of."""

    def submitted(self, key: int, now: float, *, waits: bool) -> None:
        """A sequence is accepted. `waits`: for its first turn, no longer than `max_queue_time`."""
        if not self._live and self._counted is not None:
            self._counted = now
        self._live += 1
        if waits and self._most < math.inf:
            self._waiting.append((now + self._most, key))

    def ended(self, now: float) -> None:
        """A sequence is over: somebody leaves the queue for its place. With the last one all places are forgotten."""
        self._age(now)
        self._counted = now
        self._ends += 1.0
        self._live -= 1
        if not self._live:
            self._next_place = now

    def retry_after_ms(self, now: float) -> int:
        """When one who is refused should come again: each is told of a place of its own, as fast as they get free, so
        that they don't all come back at once. None is told to come when all that live now will be over: after that of
        the last one the places begin anew, and so several come for each."""
        self._age(now)
        interval = min(self._seconds / self._ends, LATEST_S) if self._ends else LATEST_S
        self._next_place = max(now, self._next_place) + interval
        if self._next_place > now + min(self._live * interval, LATEST_S):
            self._next_place = now + interval
        return round(max(self._next_place - now, SOONEST_S) * 1e3)

    def _age(self, now: float) -> None:
        if self._counted is None:
            return
        faded = math.exp((self._counted - now) / AVERAGED_S)
        self._ends *= faded
        self._seconds = self._seconds * faded + AVERAGED_S * (1 - faded)
        self._counted = now

    def late(self, now: float) -> list[int]:
        """Keys, each told once, of those that would have waited for too long if they waited still."""
        keys = []
        while self._waiting and self._waiting[0][0] <= now:
            keys.append(self._waiting.popleft()[1])
        return keys
