"""From Tandem's Generate responses to VllmEngine's.

A stream carries the ids as deltas, and one last message for each sample; a call that is not a stream that one alone.
"""

from collections import defaultdict
from collections.abc import Iterator

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from shared.pb import generation_pb2 as pb

_FINISH_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


class Responses:
    """Of one call."""

    def __init__(self, request: vllm.GenerateRequest) -> None:
        self._stream = request.stream
        self._prompt_tokens = len(request.tokenized.input_ids)
        """Until the end tells: 0 for a prompt that came as text."""
        self._stop_token_ids = frozenset(request.sampling_params.stop_token_ids)
        self._output_ids: defaultdict[int, list[int]] = defaultdict(list)
        """By sample: all so far."""

    def convert(self, response: pb.GenerateResponse) -> Iterator[vllm.GenerateResponse]:
        """The messages that one of Tandem's becomes."""
        output_ids = self._output_ids[response.index]
        output_ids += response.token_ids
        if self._stream and response.token_ids:
            chunk = vllm.GenerateStreamChunk(
                token_ids=response.token_ids,
                prompt_tokens=self._prompt_tokens,
                completion_tokens=len(output_ids),
                index=response.index,
            )
            yield vllm.GenerateResponse(chunk=chunk)
        if response.HasField("finish"):
            yield vllm.GenerateResponse(complete=self._complete(response, output_ids))

    def _complete(self, response: pb.GenerateResponse, output_ids: list[int]) -> vllm.GenerateComplete:
        finish, usage = response.finish, response.usage
        complete = vllm.GenerateComplete(
            output_ids=output_ids,
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
        return complete
