"""Who follows what is cached, and what each has still to be told. Bounded for one that does not read.

Asks the core for news only while somebody follows. Knows nothing of gRPC.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from scheduler_svc.frontend.cache_mirror import CacheEvent, CacheMirror
from scheduler_svc.frontend.core_link import CoreLink
from shared.pb import core_pb2

MOST_PENDING = 8192
"""Events that wait for a follower. Beyond it they are dropped, and it is told everything anew."""


class Follower:
    """What one has still to be told."""

    def __init__(self, mirror: CacheMirror) -> None:
        self._mirror = mirror
        self._pending: list[CacheEvent] = []
        self._is_behind = True
        """It knows nothing, or nothing that can be built upon."""
        self._wake = asyncio.Event()
        self._wake.set()

    def add(self, events: list[CacheEvent]) -> None:
        """Something happened."""
        if not self._is_behind:
            self._pending += events
            if len(self._pending) > MOST_PENDING:
                self.fall_behind()
        self._wake.set()

    def fall_behind(self) -> None:
        """Whatever it was told or waits for is void."""
        self._is_behind = True
        self._pending = []
        self._wake.set()

    async def next(self) -> tuple[bool, list[CacheEvent]]:
        """Waits for news: whether all that came before is void, and what is new, in order."""
        while not self._pending and not self._is_behind:
            self._wake.clear()
            await self._wake.wait()
        cleared, self._is_behind = self._is_behind, False
        events, self._pending = self._pending, []
        if cleared:
            events.extend(self._mirror.blocks())
        return cleared, events


class CacheFeed:
    """The frontend's followers."""

    def __init__(self, link: CoreLink) -> None:
        self._link = link
        self._mirror = CacheMirror()
        self._followers: set[Follower] = set()

    @contextmanager
    def follow(self) -> Iterator[Follower]:
        """One more follower, until the block ends."""
        follower = Follower(self._mirror)
        if not self._followers:
            self._link.watch_cache(self)
        self._followers.add(follower)
        try:
            yield follower
        finally:
            self._followers.discard(follower)
            if not self._followers:
                self._link.watch_cache(None)
                self._mirror.clear()

    def cache_news(self, news: core_pb2.CacheNews) -> None:
        """The core tells."""
        if events := self._mirror.apply(news):
            for follower in self._followers:
                follower.add(events)

    def cache_lost(self) -> None:
        """The core is gone, and with it the knowledge of what is cached."""
        self._mirror.clear()
        for follower in self._followers:
            follower.fall_behind()
