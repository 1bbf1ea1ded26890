"""A live Generate call: its samples, and what of them its client has not got yet.

Owns what a sample has put out so far. The core link feeds it token by token and never waits; the call's one writer
takes whatever has gathered since its last message. Knows nothing of sockets or gRPC calls.
"""

import asyncio
import time
from collections.abc import Sequence
from itertools import zip_longest

from scheduler_svc.frontend.constraint import Constraint
from scheduler_svc.frontend.detokenizer import Detokenizer
from scheduler_svc.frontend.logprobs import SampleLogprobs
from scheduler_svc.frontend.stop_strings import StopStrings
from scheduler_svc.frontend.timeline import Timeline
from scheduler_svc.frontend.vocabulary import Vocabulary
from shared.errors import LimitExceeded, ProtocolError, RequestFailed, TandemError
from shared.pb import core_pb2
from shared.pb import generation_pb2 as pb
from shared.rpc import error_from_status
from shared.wire import unpack

MOST_UNREAD_BYTES = 16 << 20
"""Most output of a call that waits for its client: 262,144 tokens, so more than one sample may have; with logprobs, or
of many samples, fewer."""
_TOKEN_BYTES = 64
"""What a token without logprobs takes, as measured."""


class Sample:
    """One of a request's samples: from the core's tokens to the client's deltas and the finish reason."""

    def __init__(
        self,
        submission: core_pb2.Submit,
        detokenizer: Detokenizer,
        logprobs: SampleLogprobs,
        call: "Generation",
        constraint: Constraint | None,
    ) -> None:
        self.submission = submission
        self.logprobs = logprobs
        self.constraint = constraint
        """Has begun after the submission's output; None where any text will do."""
        self.output: list[int] = unpack(submission.output).tolist()
        """All output tokens so far, those given to resume included: what a new core continues after."""
        self.finish: pb.Finish | None = None
        self.timeline = Timeline(time.monotonic())
        self._stop_token_ids = frozenset(unpack(submission.stop_token_ids).tolist())
        self._cached_tokens: int | None = None
        self._is_new = True
        self._unread_bytes = 0
        self._detokenizer = detokenizer
        self._call = call
        stop = detokenizer.skip(self.output)
        if stop is not None:
            self._end(pb.Finish(reason=pb.FINISH_REASON_STOP, stop=stop))

    def started(self, cached_tokens: int) -> None:
        """The core admitted it. Only the first admission counts: a replay finds the request's own blocks."""
        if self._cached_tokens is None:
            self._cached_tokens = cached_tokens

    def push_prompt(self, entries: bytes) -> None:
        """The core has logprobs of the prompt's next tokens."""
        try:
            self.logprobs.push_prompt(entries)
        except ProtocolError as error:
            self.failed(RequestFailed(str(error)))
        else:
            self._call.has_news(self)

    def push(self, token_id: int, logprobs: bytes = b"") -> bool:
        """The core sampled a token. Whether the sample wants more: not after its stop string, nor of what is none."""
        try:
            self.logprobs.push(token_id, logprobs)
        except ProtocolError as error:
            self.failed(RequestFailed(str(error)))  # it alone: a core that took its place would do the same
            return False
        size = _TOKEN_BYTES + len(logprobs)
        if not self._call.has_room(size):
            return False
        self._unread_bytes += size
        self.output.append(token_id)
        if token_id in self._stop_token_ids and len(self.output) > self.submission.min_tokens:
            self._detokenizer.push_stop(token_id)
            return True
        stop = self._detokenizer.push(token_id)
        if stop is not None:
            self._end(pb.Finish(reason=pb.FINISH_REASON_STOP, stop=stop))
            return False
        if self.constraint is not None:
            self.constraint.push(token_id)
        if self._detokenizer.has_news:
            self._call.has_news(self)
        return True

    def ended(self, ended: core_pb2.Ended) -> None:
        """The core is done with it."""
        how = ended.WhichOneof("how")
        if how == "stop_token_id":
            self._end(pb.Finish(reason=pb.FINISH_REASON_STOP, token_id=ended.stop_token_id))
        elif how == "length":
            self._end(pb.Finish(reason=pb.FINISH_REASON_LENGTH))
        else:
            failure = ended.failure
            self.failed(error_from_status(failure.code, failure.message, failure.retry_after_ms))

    def failed(self, error: TandemError) -> None:
        """The sample can't go on; nor does its request."""
        self._call.fail(error)

    def _end(self, finish: pb.Finish) -> None:
        self.finish = finish
        self._detokenizer.flush()
        self._call.has_news(self)

    def take(self) -> pb.GenerateResponse:
        """What the client has not got yet: as much as one message should hold."""
        response = pb.GenerateResponse(index=self.submission.sample_index)
        response.prompt_logprobs.extend(self.logprobs.take_prompt())
        if self.logprobs.has_prompt:
            self._call.has_news(self)
            return response
        self._call.was_read(self._unread_bytes)
        self._unread_bytes = 0
        response.text, token_ids = self._detokenizer.take()
        response.token_ids.extend(token_ids)
        response.logprobs.extend(self.logprobs.take(len(token_ids)))
        if self.finish is not None:
            response.finish.CopyFrom(self.finish)
        if self.finish is not None or self._is_new:
            self._is_new = False
            response.usage.prompt_tokens = len(self.submission.prompt) // 4
            response.usage.completion_tokens = len(self.output)
            response.usage.cached_tokens = self._cached_tokens or 0
        return response


class Generation:
    """The samples of one call, and its writer's wake-up."""

    def __init__(
        self,
        submissions: Sequence[core_pb2.Submit],
        first: pb.GenerateResponse,
        vocabulary: Vocabulary,
        request: pb.GenerateRequest,
        constraints: Sequence[Constraint],
    ) -> None:
        """`submissions` are one per sample, as are `constraints` if there are any; what stands in `first` is in the
        first response."""
        self._news: dict[Sample, None] = {}
        self._wake = asyncio.Event()
        self._error: TandemError | None = None
        self._first: pb.GenerateResponse | None = first
        self._unread_bytes = 0
        stops = StopStrings.build(request.stopping.stop)
        skip, include = skips_special_tokens(request), request.output.include_stop_str_in_output
        least = request.stopping.min_tokens
        self.samples = [
            Sample(
                submission,
                Detokenizer(vocabulary, stops, least, skip_special_tokens=skip, include_stop=include),
                SampleLogprobs(submission, vocabulary),
                self,
                constraint,
            )
            for submission, constraint in zip_longest(submissions, constraints)
        ]
        self._unfinished = len(self.samples)

    def has_news(self, sample: Sample) -> None:
        """The sample has something for the client."""
        self._news[sample] = None
        self._wake.set()

    def has_room(self, size: int) -> bool:
        """Makes room for so many bytes of output; where there is none, the call ends after what has gathered."""
        if self._unread_bytes + size > MOST_UNREAD_BYTES:
            self.fail(LimitExceeded(f"the client has not read {self._unread_bytes} bytes of output: no more are kept"))
            return False
        self._unread_bytes += size
        return True

    def was_read(self, size: int) -> None:
        """The writer has taken so many bytes of them."""
        self._unread_bytes -= size

    def fail(self, error: TandemError) -> None:
        """Ends the call with an error, after what has gathered; the first one counts."""
        self._error = self._error or error
        self._wake.set()

    async def next(self) -> pb.GenerateResponse | None:
        """Waits for news and takes all of one sample; None when every sample has finished.

        Raises the error that ended the call.
        """
        while not self._news:
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                return None
            self._wake.clear()
            await self._wake.wait()
        sample = next(iter(self._news))
        del self._news[sample]
        response = sample.take()
        self._unfinished -= response.HasField("finish")
        if self._first is not None:
            response.MergeFrom(self._first)
            self._first = None
        return response


def skips_special_tokens(request: pb.GenerateRequest) -> bool:
    """Whether its text leaves special tokens out."""
    return request.output.skip_special_tokens if request.output.HasField("skip_special_tokens") else True
