"""What is counted of the requests of one frontend. Plain numbers; whoever exports reads them."""

from scheduler_svc.frontend.timeline import Timeline
from shared.errors import Aborted, LeaseHeld, Standby
from shared.histogram import LONG_S, TOKENS, Histogram
from shared.rpc import STATUS_CODES

CANCELLED, DEADLINE_EXCEEDED = "cancelled", "deadline_exceeded"
ABORTED = "aborted"
STANDBY = "standby"
_FAILURES: dict[type[Exception], str] = {
    **{kind: code.name.lower() for kind, code in STATUS_CODES.items() if kind is not LeaseHeld},  # a worker's
    Aborted: ABORTED,
    Standby: STANDBY,  # where it is sent to is told with it: no failure
}
OUTCOMES = tuple(dict.fromkeys(("stop", "length", CANCELLED, *_FAILURES.values())))
"""How a request can end: all that there are, so that no request adds a time series."""


def outcome_of(error: Exception) -> str:
    """Of a request that ended with it."""
    return _FAILURES.get(type(error), "internal")


class RequestCounts:
    """Totals since the start of the process."""

    def __init__(self) -> None:
        self.finished = dict.fromkeys(OUTCOMES, 0)
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.first_token = Histogram(LONG_S)
        self.end_to_end = Histogram(LONG_S)
        self.queue = Histogram(LONG_S)
        self.prompt_length = Histogram(TOKENS)
        self.generation_length = Histogram(TOKENS)

    def prompt(self, tokens: int) -> None:
        """A prompt was accepted."""
        self.prompt_tokens += tokens
        self.prompt_length.observe(tokens)

    def sample(self, timeline: Timeline, generated: int) -> None:
        """A sample that has ended, with so many tokens."""
        if timeline.queue_s is not None:
            self.queue.observe(timeline.queue_s)
        self.generation_length.observe(generated)

    def end(self, outcome: str, seconds: float) -> None:
        """A request has ended."""
        self.finished[outcome] += 1
        self.end_to_end.observe(seconds)
