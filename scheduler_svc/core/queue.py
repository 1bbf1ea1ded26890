"""The sequences that wait for admission, most important first. Decides nothing about who fits."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler_svc.core.request import Sequence
from scheduler_svc.core.turns import Turns


class WaitingQueue:
    """Sorted by (priority, turn, arrival): who comes back from a group is again ahead of those who came later."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self.turns = Turns()
        self.tokens = 0
        """Known tokens of all that wait."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """In order, as of now: the queue may change meanwhile."""
        return iter(tuple(self._sequences))

    def more_important_than(self, priority: int) -> list[Sequence]:
        """Those with a smaller priority number, in order."""
        return self._sequences[: bisect_left(self._sequences, (priority, 0, 0), key=_rank)]

    def begin(self, sequence: Sequence) -> None:
        """A new sequence gets its turn and its place."""
        priority = sequence.request.priority
        self.turns.join(priority)
        sequence.turn = self.turns.take(priority, sequence.request.client, sequence.cost)
        self._insert(sequence)

    def add(self, sequence: Sequence) -> None:
        """Back to its place."""
        self.turns.join(sequence.request.priority)
        self._insert(sequence)

    def _insert(self, sequence: Sequence) -> None:
        self.tokens += sequence.waiting_length
        insort(self._sequences, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """It is in the queue."""
        at = bisect_left(self._sequences, sequence.rank, key=_rank)
        assert self._sequences[at] is sequence, f"sequence {sequence.request.key} is not in the queue"
        del self._sequences[at]
        self.tokens -= sequence.waiting_length
        self.turns.leave(sequence.request.priority)


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank
