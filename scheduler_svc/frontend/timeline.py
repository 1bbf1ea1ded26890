"""When what happened to one sample, and the spans of that. Times are seconds of the host's monotonic clock.

Knows nothing of tokens' values, clients or tracing libraries.
"""

from collections.abc import Iterator
from dataclasses import dataclass

PREEMPTED = "preempted"
WORKER_LOST = "worker lost"
TAINTED = "tainted"
DRAINED = "drained"
CORE_LOST = "core lost"


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time with a name."""

    name: str
    began: float
    ended: float
    cause: str = ""
    """Of a replay."""


class Timeline:
    """Begins when the sample is handed to the core."""

    def __init__(self, now: float) -> None:
        self.submitted = now
        self.admitted: float | None = None
        """When it first got a slot."""
        self.first_token: float | None = None
        self._last_token: float | None = None
        self._replays: list[Span] = []
        self._replaying: tuple[str, float] | None = None
        """Why, since when."""

    def started(self, at: float) -> None:
        """The core admitted it; the first time counts."""
        if self.admitted is None:
            self.admitted = at

    def requeued(self, cause: str, at: float) -> None:
        """What was computed of it is gone: it is computed again, up to its next token."""
        if self.admitted is not None and self._replaying is None:
            self._replaying = (cause, at)

    def token(self, now: float) -> float | None:
        """A token is there; the seconds since the one before, if there was one."""
        if self._replaying is not None:
            self._end_replay(now)
        last, self._last_token = self._last_token, now
        if last is None:
            self.first_token = now
            return None
        return now - last

    def _end_replay(self, now: float) -> None:
        assert self._replaying is not None, "asked for while one is on"
        cause, began = self._replaying
        self._replays.append(Span("replay", began, now, cause))
        self._replaying = None

    def close(self, now: float) -> None:
        """Nothing more will happen."""
        if self._replaying is not None:
            self._end_replay(now)

    @property
    def queue_s(self) -> float | None:
        """Seconds until it was first admitted; None if it never was."""
        return None if self.admitted is None else self.admitted - self.submitted

    @property
    def preemptions(self) -> int:
        """Replays because others were more important."""
        return sum(span.cause == PREEMPTED for span in self._replays)

    @property
    def replays(self) -> int:
        """Replays because something was lost or drained."""
        return len(self._replays) - self.preemptions

    def spans(self, now: float) -> Iterator[Span]:
        """Queue, prefill and decode, one after the other, as far as it came until `now`; and the replays."""
        yield Span("queue", self.submitted, now if self.admitted is None else self.admitted)
        if self.admitted is not None:
            yield Span("prefill", self.admitted, now if self.first_token is None else self.first_token)
        if self.first_token is not None:
            yield Span("decode", self.first_token, now)
        yield from self._replays
