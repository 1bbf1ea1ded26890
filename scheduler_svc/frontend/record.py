"""What is told of one request when it ends: a line in the log, the counts, its trace. Counts and times, never text."""

import time

import structlog

from scheduler_svc.frontend.attempts import Attempts
from scheduler_svc.frontend.generation import Sample
from scheduler_svc.frontend.request_counts import CANCELLED, RequestCounts, outcome_of
from scheduler_svc.frontend.tracing import Attributes, Trace
from shared.pb import generation_pb2 as pb

_log = structlog.get_logger(__name__)


class Record:
    """Begins when the request arrives."""

    def __init__(self, request_id: str, trace: Trace, counts: RequestCounts, attempts: Attempts) -> None:
        self.request_id = request_id
        self.outcome = CANCELLED
        """What it is until it ends otherwise: the caller left."""
        self._trace = trace
        self._counts = counts
        self._attempts = attempts
        self._prompt_tokens = 0
        self._samples: list[Sample] = []
        self._completion_tokens = 0
        self._cached_tokens = 0
        self._arrived = time.monotonic()
        self._first: float | None = None

    def accepted(self, prompt_tokens: int, samples: list[Sample]) -> None:
        """The request is valid, and these are its samples."""
        self._prompt_tokens = prompt_tokens
        self._samples = samples
        self._counts.prompt(prompt_tokens)

    def count(self, response: pb.GenerateResponse) -> None:
        """One more message. The outcome of a finished call is its last sample's."""
        self._completion_tokens += len(response.token_ids)
        self._counts.generation_tokens += len(response.token_ids)
        if response.HasField("finish"):
            self.outcome = pb.FinishReason.Name(response.finish.reason).removeprefix("FINISH_REASON_").lower()
            self._cached_tokens = response.usage.cached_tokens
        if self._first is None and response.token_ids:
            self._first = time.monotonic()
            self._counts.first_token.observe(self._first - self._arrived)

    def failed(self, error: Exception) -> None:
        """It ends with an error."""
        self.outcome = outcome_of(error)

    def close(self) -> pb.RequestStats | None:
        """The call is over; what the service's statistics tell of its request. None where that was told before."""
        now = time.monotonic()
        for sample in self._samples:
            sample.timeline.close(now)
        self._end_trace(now)
        if self._attempts.is_repeated(self.request_id, self.outcome, self._completion_tokens):
            return None
        for sample in self._samples:
            self._counts.sample(sample.timeline, len(sample.output))
        self._counts.end(self.outcome, now - self._arrived)
        self._log(now)
        return self._stats(now)

    def _stats(self, now: float) -> pb.RequestStats:
        return pb.RequestStats(
            request_id=self.request_id,
            outcome=self.outcome,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            completion_tokens=self._completion_tokens,
            first_token_ms=((self._first or now) - self._arrived) * 1e3,
            total_ms=(now - self._arrived) * 1e3,
        )

    def _log(self, now: float) -> None:
        timelines = [sample.timeline for sample in self._samples]
        queue_s = max((timeline.queue_s or 0.0 for timeline in timelines), default=0.0)
        trace = {"trace_id": self._trace.trace_id} if self._trace.trace_id else {}
        _log.info(
            "request",
            request_id=self.request_id,
            outcome=self.outcome,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            completion_tokens=self._completion_tokens,
            queue_ms=round(queue_s * 1e3, 1),
            first_token_ms=None if self._first is None else round((self._first - self._arrived) * 1e3, 1),
            total_ms=round((now - self._arrived) * 1e3, 1),
            preemptions=sum(timeline.preemptions for timeline in timelines),
            replays=sum(timeline.replays for timeline in timelines),
            **trace,
        )

    def _end_trace(self, now: float) -> None:
        spans = [span for sample in self._samples for span in sample.timeline.spans(now)]
        attributes: Attributes = {
            "tandem.request.id": self.request_id,
            "tandem.outcome": self.outcome,
            "gen_ai.usage.input_tokens": self._prompt_tokens,
            "gen_ai.usage.output_tokens": self._completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": self._cached_tokens,
        }
        self._trace.end(spans, attributes, None if self.outcome in ("stop", "length") else self.outcome)
