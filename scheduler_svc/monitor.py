"""What the core process tells people who watch it: its counters, and the latest requests of all frontends.

Knows nothing of sequences; the engine hands it what passes by.
"""

import time
from collections import deque
from itertools import islice

from scheduler_svc.core import Counters
from shared.pb.generation_pb2 import GetStatsResponse, RequestStats

KEPT_REQUESTS = 256


class Monitor:
    """Counts from 0 in every core process."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._requests = 0
        self._latest: deque[tuple[float, RequestStats]] = deque(maxlen=KEPT_REQUESTS)

    def request_ended(self, request: RequestStats) -> None:
        """A call has ended."""
        self._requests += 1
        self._latest.appendleft((time.monotonic(), request))

    def stats(self, max_requests: int, counters: Counters) -> GetStatsResponse:
        """All of it, with the newest `max_requests` requests."""
        now = time.monotonic()
        stats = GetStatsResponse(
            uptime_s=now - self._started,
            prompt_tokens=counters.prefix_queries - counters.prefix_hits,
            generation_tokens=counters.sampled_tokens,
            preemptions=counters.preemptions,
            replays=counters.requeued,
            requests=self._requests,
        )
        for ended, request in islice(self._latest, max_requests):
            stats.latest.append(request)
            stats.latest[-1].age_s = now - ended
        return stats
