"""Logprobs in VllmEngine's form: lists side by side, one element for each token."""

from collections.abc import Sequence

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from shared.pb import generation_pb2 as pb


def output_logprobs(tokens: Sequence[pb.TokenLogprob]) -> vllm.OutputLogProbs:
    """Of sampled tokens."""
    return vllm.OutputLogProbs(
        token_logprobs=[token.logprob for token in tokens],
        token_ids=[token.token_id for token in tokens],
        top_logprobs=map(_top, tokens),
    )


def input_logprobs(tokens: Sequence[pb.TokenLogprob]) -> vllm.InputLogProbs:
    """Of a prompt, whose first token has none."""
    values = [token.logprob if token.HasField("logprob") else None for token in tokens]
    return vllm.InputLogProbs(
        token_logprobs=[vllm.InputTokenLogProb(value=value) for value in values],
        token_ids=[token.token_id for token in tokens],
        top_logprobs=map(_top, tokens),
    )


def _top(token: pb.TokenLogprob) -> vllm.TopLogProbs:
    return vllm.TopLogProbs(
        values=[top.logprob for top in token.top_logprobs],
        token_ids=[top.token_id for top in token.top_logprobs],
    )
