"""From Tandem's Generate responses to VllmEngine's.

A stream carries ids and logprobs as deltas, and one last message for each sample; a call that is not a stream that one
alone.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from scheduler_svc.frontend.vllm_engine.logprobs import input_logprobs, output_logprobs
from shared.pb import generation_pb2 as pb

_FINISH_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


@dataclass(slots=True)
class _Sample:
    """What has come of one sample."""

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    """Not yet sent."""
    prompt_logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    """Not yet sent."""


class Responses:
    """Of one call."""

    def __init__(self, request: vllm.GenerateRequest) -> None:
        self._stream = request.stream
        self._prompt_tokens = len(request.tokenized.input_ids)
        """Until the end tells: 0 for a prompt that came as text."""
        self._stop_token_ids = frozenset(request.sampling_params.stop_token_ids)
        self._samples: defaultdict[int, _Sample] = defaultdict(_Sample)
        self._unfinished = request.sampling_params.n or 1
        self._complete: dict[int, vllm.GenerateComplete] = {}
        """Finished samples of a call that is no stream: they are told in order, since callers count them."""

    def convert(self, response: pb.GenerateResponse) -> Iterator[vllm.GenerateResponse]:
        """The messages that one of Tandem's becomes."""
        sample = self._samples[response.index]
        sample.output_ids += response.token_ids
        sample.logprobs += response.logprobs
        sample.prompt_logprobs += response.prompt_logprobs
        if self._stream and response.token_ids:
            chunk = vllm.GenerateStreamChunk(
                token_ids=response.token_ids,
                prompt_tokens=self._prompt_tokens,
                completion_tokens=len(response.token_ids),
                index=response.index,
            )
            _move_logprobs(sample, chunk)
            yield vllm.GenerateResponse(chunk=chunk)
        if response.HasField("finish"):
            self._unfinished -= 1
            self._complete[response.index] = self._last_message(response, sample)
        if self._stream or not self._unfinished:
            for index in sorted(self._complete):
                yield vllm.GenerateResponse(complete=self._complete.pop(index))

    def _last_message(self, response: pb.GenerateResponse, sample: _Sample) -> vllm.GenerateComplete:
        finish, usage = response.finish, response.usage
        complete = vllm.GenerateComplete(
            output_ids=sample.output_ids,
            finish_reason=_FINISH_REASONS[finish.reason],
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            index=response.index,
        )
        if finish.HasField("stop"):
            complete.matched_stop_str = finish.stop
        elif finish.HasField("token_id") and finish.token_id in self._stop_token_ids:
            complete.matched_token_id = finish.token_id
        _move_logprobs(sample, complete)
        return complete


def _move_logprobs(sample: _Sample, message: vllm.GenerateStreamChunk | vllm.GenerateComplete) -> None:
    """What has not been sent yet goes with this message."""
    if sample.logprobs:
        message.output_logprobs.CopyFrom(output_logprobs(sample.logprobs))
    if sample.prompt_logprobs:
        message.input_logprobs.CopyFrom(input_logprobs(sample.prompt_logprobs))
    sample.logprobs, sample.prompt_logprobs = [], []
