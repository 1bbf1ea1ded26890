"""What is cached by any worker group, put together from the core's news. Knows nothing of sockets or subscribers.

Only blocks that a prompt without a salt can reach are in it: what tenants with salts have is nobody else's business.
"""

from collections import Counter
from typing import NamedTuple, TypeAlias

from shared.pb import core_pb2


class CachedBlock(NamedTuple):
    """A full block of tokens whose K/V is there."""

    block: int
    """Names its content and all that precedes it: 64 bits, unsigned."""
    parent: int | None
    """The block that it continues."""
    token_ids: bytes
    """int32"""


CacheEvent: TypeAlias = CachedBlock | int
"""A block that some group has now, or the name of one that no group has any more."""


class CacheMirror:
    """The union of the groups' caches."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[int, CachedBlock]] = {}
        self._holders: Counter[int] = Counter()
        """How many groups have a block; no entry for none."""

    def apply(self, news: core_pb2.CacheNews) -> list[CacheEvent]:
        """What the news mean for the union."""
        held = self._groups.setdefault(news.group, {})
        events: list[CacheEvent] = []
        if news.cleared:
            events += [block for block in held if self._released(block)]
            held.clear()
        for change in news.changes:
            if not change.token_ids:
                if held.pop(change.block, None) is not None and self._released(change.block):
                    events.append(change.block)
                continue
            parent = change.parent if change.HasField("parent") else None
            if change.block in held or (parent is not None and parent not in held):
                continue
            cached = held[change.block] = CachedBlock(change.block, parent, change.token_ids)
            self._holders[change.block] += 1
            if self._holders[change.block] == 1:
                events.append(cached)
        if not held:
            del self._groups[news.group]  # a group that is gone for good has no number that comes back
        return events

    def _released(self, block: int) -> bool:
        self._holders[block] -= 1
        if self._holders[block]:
            return False
        del self._holders[block]
        return True

    def clear(self) -> None:
        """Nothing is cached, or nothing is known."""
        self._groups.clear()
        self._holders.clear()

    def blocks(self) -> list[CachedBlock]:
        """All that is cached, each once, parents before children. O(blocks)."""
        found: dict[int | None, CachedBlock] = {}
        for held in self._groups.values():
            for cached in held.values():
                # A parent that left and came back later is no longer the one that its children continue.
                if cached.parent is None or cached.parent in found:
                    found.setdefault(cached.block, cached)
        return list(found.values())
