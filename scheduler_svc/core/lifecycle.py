"""The live sequences: how each begins, goes back to the queue, and ends. The one owner of every per-request map."""

from collections.abc import Mapping

from scheduler_svc.core.group import Group
from scheduler_svc.core.outputs import Counters, Ended, Outbox, RequeueCause
from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.core.request import Sequence, State
from shared.errors import TandemError
from shared.types import FinishReason


class Lifecycle:
    """Queue, registry, outbox and counters, kept consistent."""

    def __init__(self, groups: Mapping[int, Group]) -> None:
        self.queue = WaitingQueue()
        self.outbox = Outbox()
        self.counters = Counters()
        self.by_key: dict[int, Sequence] = {}
        self.by_id: dict[str, dict[int, int]] = {}
        """Request id to sample index to key."""
        self._groups = groups

    def begin(self, sequence: Sequence) -> None:
        """A new sequence waits."""
        request = sequence.request
        self.by_key[request.key] = sequence
        self.by_id.setdefault(request.request_id, {})[request.sample_index] = request.key
        self.queue.begin(sequence)

    def start(self, sequence: Sequence, cached: int) -> None:
        """It leaves the queue for a group that has its first `cached` tokens; its caller is told the first time."""
        self.queue.turns.served(sequence.request.priority, sequence.turn)
        self.queue.remove(sequence)
        self.counters.admissions += 1
        if not sequence.started:
            sequence.started = True
            prompt = len(sequence.request.prompt)
            hits = min(cached, prompt)
            self.counters.prefix_queries += prompt
            self.counters.prefix_hits += hits
            self.outbox.start(sequence.request.key, hits)

    def requeue(self, group: Group, sequence: Sequence, cause: RequeueCause) -> None:
        """A running sequence goes back to its place in the queue, to be computed again; its caller is told."""
        group.leave(sequence, State.WAITING)
        self.queue.add(sequence)
        self.outbox.requeue(sequence.request.key, cause)

    def end(self, sequence: Sequence, how: FinishReason | TandemError, stop_token_id: int | None = None) -> None:
        """It is over, and its caller is told."""
        self.forget(sequence)
        self.outbox.end(Ended(sequence.request.key, how, stop_token_id))

    def forget(self, sequence: Sequence) -> None:
        """It is over, and its caller knows."""
        if sequence.group is None:
            sequence.move(State.ENDED)
            self.queue.remove(sequence)
        else:
            self._groups[sequence.group].leave(sequence, State.ENDED)
        request = sequence.request
        del self.by_key[request.key]
        samples = self.by_id[request.request_id]
        del samples[request.sample_index]
        if not samples:
            del self.by_id[request.request_id]
