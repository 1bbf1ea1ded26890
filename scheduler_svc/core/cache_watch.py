"""What the groups' prefix caches gain and lose, for who wants to follow them. Knows nothing of who does."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from scheduler_svc.core.group import Group
from scheduler_svc.core.prefix import CacheChange


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """News of one group's cache."""

    group: int
    cleared: bool
    """All that it held before is gone."""
    changes: list[CacheChange]
    """What came and went after that, in order; a parent comes before its children."""


class CacheWatch:
    """Collects only while somebody watches: nothing is kept otherwise."""

    def __init__(self, groups: Mapping[int, Group]) -> None:
        """`groups` holds those that are there, by number."""
        self._groups = groups
        self._watching = False
        self._cleared: set[int] = set()
        """Groups whose cache was lost since the last take()."""

    def watch(self, watching: bool) -> None:
        """Begins or ends collecting. What is cached at the beginning is for contents() to tell."""
        self._watching = watching
        self._cleared.clear()
        for group in self._groups.values():
            self._collect(group)

    def opened(self, group: Group) -> None:
        """A group begins, with an empty cache."""
        self._collect(group)

    def closed(self, number: int) -> None:
        """A group's cache is lost."""
        if self._watching:
            self._cleared.add(number)

    def contents(self) -> Iterator[CacheChanges]:
        """Everything that is cached now; groups that are away have nothing. O(pools)."""
        for number, group in self._groups.items():
            yield CacheChanges(number, True, [*group.pool.prefix.entered()])

    def take(self) -> list[CacheChanges]:
        """What is new since the last time."""
        news = []
        for number in sorted(self._cleared | self._groups.keys()):
            group = self._groups.get(number)
            changes = group.pool.prefix.changes if group is not None else None
            if changes or number in self._cleared:
                news.append(CacheChanges(number, number in self._cleared, changes or []))
                if group is not None:
                    self._collect(group)
        self._cleared.clear()
        return news

    def _collect(self, group: Group) -> None:
        group.pool.prefix.changes = [] if self._watching else None
