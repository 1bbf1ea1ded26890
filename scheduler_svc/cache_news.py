"""Which frontends follow what is cached, and what each has been told. Knows nothing of sockets or sequences."""

from collections.abc import Callable

from scheduler_svc.core import CacheChanges, CacheWatch


class CacheReporter:
    """Tells every watching frontend first all that is cached, then what changes."""

    def __init__(self, tell: Callable[[int, CacheChanges], None]) -> None:
        """`tell` sends news to the frontend of a number."""
        self._tell = tell
        self._peers: set[int] = set()
        self._cache: CacheWatch | None = None

    def attach(self, cache: CacheWatch) -> None:
        """The core begins, with nothing cached."""
        self._cache = cache
        cache.watch(bool(self._peers))

    def watch(self, peer: int, watch: bool) -> None:
        """The frontend `peer` begins or ends following; one that watches already is told everything again."""
        self.tell()
        watched = bool(self._peers)
        (self._peers.add if watch else self._peers.discard)(peer)
        if self._cache is None:
            return
        if watched != bool(self._peers):
            self._cache.watch(not watched)
        if watch:
            for news in self._cache.contents():
                self._tell(peer, news)

    def tell(self) -> None:
        """What is new since the last time."""
        if not self._peers or self._cache is None:
            return
        for news in self._cache.take():
            for peer in self._peers:
                self._tell(peer, news)
