"""How a request survives the loss of its server: what its caller has got, what is left to ask for, and for how long.

Pure: no I/O, no clock and no randomness of its own. The streams do what it says.
"""

from dataclasses import dataclass, field, replace

from shared.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    QueueFull,
    RequestFailed,
    Standby,
    TandemError,
    Unavailable,
)
from shared.pb import generation_pb2 as pb
from tandem.values import Delta, Usage, delta_from_pb

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
LONGEST_HINT_S = 30.0
"""Of a server's hint when to try again, whatever it says."""

RESUMABLE = (Unavailable, DuplicateRequest, QueueFull)
"""Kinds after which a request that was lost is tried again: the server may hold the lost call for live until it notices
the loss, and the queue in which it had a place may be full."""


@dataclass(slots=True)
class _Received:
    """What the caller has of one sample."""

    token_ids: list[int] = field(default_factory=list)
    started: Usage | None = None
    """From the sample's very first response: the cache of a second server says nothing of this sample."""
    finished: bool = False

    def usage(self, delta: Delta) -> Usage | None:
        """In the last delta alone."""
        if delta.usage is None or not self.finished:
            return None
        assert self.started is not None, "it is this one, if no earlier one came"
        return replace(delta.usage, cached_tokens=self.started.cached_tokens)


class Progress:
    """A request with its seed, and what has been received of it."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        """`request` has a seed: without one the rest would be another output than the one that was begun."""
        self._request = request
        self._first = request.sample_index
        self._samples = {index: _Received() for index in range(self._first, self._first + (request.n or 1))}
        self._is_echoed = False
        self._prompt_logprobs = 0
        """How many the caller has."""
        self._repeated = 0
        """How many of them the calls that run will tell again."""

    def remaining(self) -> list[pb.GenerateRequest]:
        """What to ask for now: all at first, later each unfinished sample on its own, from its last token on."""
        self._repeated = self._prompt_logprobs
        if not any(sample.token_ids or sample.finished for sample in self._samples.values()):
            return [self._request]
        return [self._rest(index, sample) for index, sample in self._samples.items() if not sample.finished]

    def _rest(self, index: int, sample: _Received) -> pb.GenerateRequest:
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        request.n = 1
        request.sample_index = index
        request.output_token_ids.ids.extend(sample.token_ids)
        if index != self._first:
            request.output.ClearField("prompt_logprobs")  # told once, with the first sample
        return request

    def take(self, response: pb.GenerateResponse) -> Delta:
        """What is new in a response, as if it came from the server that was asked first. Raises RequestFailed where no
        server of Tandem sends it."""
        delta, sample = delta_from_pb(response), self._samples.get(response.index)
        if sample is None or sample.finished or (delta.finish is not None and delta.usage is None):
            raise RequestFailed(
                f"a message of sample {response.index} that can't come now: not from this kind of server"
            )
        sample.token_ids += delta.token_ids
        sample.finished = delta.finish is not None
        sample.started = sample.started or delta.usage
        return replace(self._of_prompt(delta), usage=sample.usage(delta))

    def check_finished(self) -> None:
        """At the end of the calls. Raises RequestFailed where a sample has no last delta."""
        unfinished = [index for index, sample in self._samples.items() if not sample.finished]
        if unfinished:
            raise RequestFailed(f"the stream ended before sample {unfinished[0]} did: not from this kind of server")

    def _of_prompt(self, delta: Delta) -> Delta:
        """Without what has been told of the prompt before: a server tells it as long as it has sent no token."""
        echo = None if self._is_echoed else delta.echo
        self._is_echoed = self._is_echoed or echo is not None
        known = min(self._repeated, len(delta.prompt_logprobs))
        self._repeated -= known
        self._prompt_logprobs += len(delta.prompt_logprobs) - known
        return replace(delta, echo=echo, prompt_logprobs=delta.prompt_logprobs[known:])


class Patience:
    """Whether to try again, and after which pause. Times are seconds on the caller's clock."""

    def __init__(
        self, now: float, limit: float, timeout: float | None, endpoints: int, queue_timeout: float = 0.0
    ) -> None:
        """`limit`: how long after a loss a request is given up that made no progress since, 0: at once; `timeout`: for
        the whole request; `queue_timeout`: how long one that finds the queue full tries again."""
        self._queue_limit = now + queue_timeout
        self._deadline = None if timeout is None else now + timeout
        self._limit = limit
        self._untried = endpoints - 1
        self._accepted = self._stands_by = False
        self._lost_since: float | None = None
        self._pause = FIRST_PAUSE_S

    def remaining(self, now: float) -> float | None:
        """Seconds that the next attempt may take."""
        return None if self._deadline is None else max(self._deadline - now, 0.0)

    def accepted(self) -> None:
        """A server has taken the request, or will: the endpoints are no mistake."""
        self._accepted = True

    def progressed(self) -> None:
        """Something of the output has come."""
        self._accepted = True
        self._lost_since = None
        self._pause = FIRST_PAUSE_S

    def pause_after(self, error: TandemError, now: float, jitter: float) -> float:
        """Seconds to wait before the next attempt; `jitter` is within [0, 1]. Raises the error where there is none.

        Before any server has taken the request, every endpoint is tried once: who mistyped an address is told at once.
        Where one stands by, another is about to serve, and is waited for.
        """
        self._stands_by = self._stands_by or isinstance(error, Standby)
        if isinstance(error, QueueFull) and self._lost_since is None:
            return self._until_room(error, now, jitter)
        if not self._accepted:
            if isinstance(error, Unavailable) and self._untried:
                self._untried -= 1
                return 0.0
            if not self._stands_by:
                raise error
        if self._lost_since is None:
            if not isinstance(error, Unavailable):
                raise error
            self._lost_since = now
        if not isinstance(error, RESUMABLE) or now - self._lost_since >= self._limit:
            raise error
        pause = self._pause * (0.5 + jitter / 2)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
        if isinstance(error, QueueFull):
            pause = max(pause, _hint(error, jitter))
        self._require_time(error, now + pause)
        return pause

    def _until_room(self, error: QueueFull, now: float, jitter: float) -> float:
        """At another endpoint at once, if there is one that was not asked. Where the hint reaches beyond the time that
        is left, after half to three quarters of it: the hint may be wrong, and who is refused together ends together.
        """
        left = self._queue_limit - now
        if left < FIRST_PAUSE_S:
            raise error
        if self._untried:
            self._untried -= 1
            return 0.0
        pause = _hint(error, jitter)
        if pause > left:
            pause = left * (0.5 + jitter / 4)
        self._require_time(error, now + pause)
        return pause

    def _require_time(self, error: TandemError, until: float) -> None:
        if self._deadline is not None and until >= self._deadline:
            raise DeadlineExceeded(f"the request's time is over; before that: {error}")


def _hint(error: QueueFull, jitter: float) -> float:
    """Never sooner than the server says, and up to a quarter later: who was refused together does not come together."""
    return min(error.retry_after_ms / 1e3, LONGEST_HINT_S) * (1 + jitter / 4)
