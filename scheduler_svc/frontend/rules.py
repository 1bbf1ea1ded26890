"""The fields of SamplingParams that change logits: checked by name and bound, and resolved to logit rules."""

from collections.abc import Sequence

import numpy as np

from scheduler_svc.frontend.bounds import at_most, checked_ids, within
from shared.errors import InvalidRequest
from shared.logit_rules import LogitRules
from shared.model_config import SamplingDefaults
from shared.pb import generation_pb2 as pb

MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0  # logits stay finite in float32
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_BAD_WORDS = 64
MAX_BAD_WORD_BYTES = 128


def check_rules(sampling: pb.SamplingParams, vocabulary_size: int) -> None:
    """Raises InvalidRequest."""
    for name in ("presence_penalty", "frequency_penalty"):
        within(f"sampling.{name}", getattr(sampling, name), -MAX_PENALTY, MAX_PENALTY)
    if sampling.HasField("repetition_penalty"):
        value = round(sampling.repetition_penalty, 6)  # 0.01 is a little less as float32
        within("sampling.repetition_penalty", value, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    at_most("sampling.logit_bias", len(sampling.logit_bias), MAX_BIASES, "ids")
    for token, value in sampling.logit_bias.items():
        field = f"sampling.logit_bias[{token}]"
        if not 0 <= token < vocabulary_size:
            raise InvalidRequest(field, f"its id must be within [0, {vocabulary_size})")
        within(field, value, -MAX_BIAS, MAX_BIAS)
    at_most("sampling.bad_words", len(sampling.bad_words), MAX_BAD_WORDS, "words")
    for index, word in enumerate(sampling.bad_words):
        within(f"sampling.bad_words[{index}]", len(word.encode()), 1, MAX_BAD_WORD_BYTES, " bytes")
    if sampling.HasField("allowed_token_ids"):
        allowed = sampling.allowed_token_ids.ids
        if not allowed:
            raise InvalidRequest("sampling.allowed_token_ids", "must not be empty")
        checked_ids("sampling.allowed_token_ids", allowed, vocabulary_size)


def resolve_rules(
    sampling: pb.SamplingParams,
    defaults: SamplingDefaults,
    vocabulary_size: int,
    bad_words: Sequence[tuple[int, ...]],
    held_back: Sequence[int],
) -> LogitRules:
    """Of checked fields. `bad_words` are tokenized; `held_back` may not be sampled before min_tokens.

    Raises InvalidRequest where nothing would be left to sample.
    """
    forbidden = {word[0] for word in bad_words if len(word) == 1} | set(held_back)
    if sampling.HasField("allowed_token_ids") and forbidden.issuperset(sampling.allowed_token_ids.ids):
        raise InvalidRequest("sampling.allowed_token_ids", "bad_words and min_tokens leave none of them")
    repeated = sampling.HasField("repetition_penalty")
    return LogitRules(
        allowed=_bits(sampling.allowed_token_ids.ids, vocabulary_size),
        bad_words=tuple(bad_words),
        bias=tuple(sorted(sampling.logit_bias.items())),
        repetition_penalty=sampling.repetition_penalty if repeated else defaults.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
    )


def _bits(ids: Sequence[int], vocabulary_size: int) -> bytes:
    """Bit v % 8 of byte v // 8 for each id v; nothing for no ids."""
    if not ids:
        return b""
    flags = np.zeros(vocabulary_size, dtype=bool)
    flags[np.array(ids)] = True
    return np.packbits(flags, bitorder="little").tobytes()
