"""Whose turn it is among the clients that wait: start-time fair queueing (Goyal, Vin and Cheng, 1996).

A request's turn is fixed when it comes: where its client's previous one ends, counted in tokens, but not before what is
served just then. Who asks for much is so told off against itself, and a client that was idle saves up nothing. Each
priority has turns of its own. Every operation is O(1). Knows nothing of the queue's order.
"""

from dataclasses import dataclass, field

MOST_CLIENTS = 4096
"""Clients of one priority whose last turn is remembered; beyond it whoever was quiet for longest is new again."""


@dataclass(slots=True)
class _Level:
    """One priority, while somebody of it waits."""

    now: int
    """Turn of the last request that was served."""
    waiting: int = 0
    following: dict[str, int] = field(default_factory=dict)
    """Where each client's next turn begins; who came last is last."""


class Turns:
    """Turns of all priorities."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._latest = 0
        """The highest turn ever given: a priority begins there, so that who comes back from a group keeps its place."""

    def join(self, priority: int) -> None:
        """One more of the priority waits."""
        if priority not in self._levels:
            self._levels[priority] = _Level(self._latest)
        self._levels[priority].waiting += 1

    def leave(self, priority: int) -> None:
        """One of them waits no more."""
        level = self._levels[priority]
        level.waiting -= 1
        if not level.waiting:
            del self._levels[priority]

    def take(self, priority: int, client: str, cost: int) -> int:
        """The turn of a new request that has joined and costs so many tokens."""
        level = self._levels[priority]
        turn = max(level.now, level.following.pop(client, 0))
        level.following[client] = turn + cost
        if len(level.following) > MOST_CLIENTS:
            del level.following[next(iter(level.following))]
        self._latest = max(self._latest, turn)
        return turn

    def served(self, priority: int, turn: int) -> None:
        """A request that waits, with this turn, is about to leave for a group."""
        level = self._levels[priority]
        level.now = max(level.now, turn)

    @property
    def waiting(self) -> dict[int, int]:
        """How many wait, by priority."""
        return {priority: level.waiting for priority, level in self._levels.items()}
