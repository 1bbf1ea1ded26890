"""What of a request is wrong whatever the pools: a frontend has checked its client's, this checks the frontend's.

What passes here every worker takes: one that refused a plan would cost all who run there a replay.
"""

import math

import numpy as np

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.request import Request
from shared.errors import InvalidRequest
from shared.logit_rules import NO_RULES, LogitRules
from shared.logprobs import MOST_LOGPROBS
from shared.types import IntArray


def check_request(request: Request, config: CoreConfig) -> None:
    """Raises InvalidRequest, naming field and bound."""
    if not len(request.prompt):
        raise InvalidRequest("prompt", "must have at least one token")
    named = {"prompt": request.prompt, "output": request.output, "stop_token_ids": _ints(request.stop_token_ids)}
    for field, ids in named.items():
        _check_ids(field, ids, config.vocabulary_size)
    if request.max_tokens is not None and request.max_tokens < 1:
        raise InvalidRequest("max_tokens", f"must be at least 1, not {request.max_tokens}")
    if request.min_tokens < 0:
        raise InvalidRequest("min_tokens", f"must be at least 0, not {request.min_tokens}")
    if request.max_tokens is not None and request.min_tokens > request.max_tokens:
        raise InvalidRequest("min_tokens", f"is {request.min_tokens}, above max_tokens of {request.max_tokens}")
    _check_sampling(request, config)
    if request.rules is not NO_RULES:
        _check_rules(request.rules, config)


def _check_sampling(request: Request, config: CoreConfig) -> None:
    """Written so that NaN fails every bound."""
    most = min(MOST_LOGPROBS, config.vocabulary_size)
    for field, good, bound in (
        ("temperature", 0 <= request.temperature < math.inf, "[0, infinity)"),
        ("top_k", request.top_k >= 0, "[0, infinity)"),
        ("top_p", 0 < request.top_p <= 1, "(0, 1]"),
        ("min_p", 0 <= request.min_p <= 1, "[0, 1]"),
        ("logprobs", 0 <= (request.logprobs or 0) <= most, f"[0, {most}]"),
        ("prompt_logprobs", 0 <= (request.prompt_logprobs or 0) <= most, f"[0, {most}]"),
    ):
        if not good:
            raise InvalidRequest(field, f"{getattr(request, field)} is not within {bound}")


def _check_rules(rules: LogitRules, config: CoreConfig) -> None:
    named = {"bias": [token for token, _ in rules.bias], "bad_words": [i for word in rules.bad_words for i in word]}
    for field, tokens in named.items():
        _check_ids(f"rules.{field}", _ints(tokens), config.vocabulary_size)
    numbers = (rules.repetition_penalty, rules.frequency_penalty, rules.presence_penalty)
    if not (all(map(math.isfinite, (*numbers, *(value for _, value in rules.bias)))) and rules.repetition_penalty > 0):
        raise InvalidRequest("rules", "a number is not finite, or repetition_penalty is not above 0")
    if not all(rules.bad_words):
        raise InvalidRequest("rules.bad_words", "has a word without tokens")
    if rules.allowed and len(rules.allowed) != -(-config.vocabulary_size // 8):
        raise InvalidRequest("rules.allowed", f"{len(rules.allowed)} bytes for {config.vocabulary_size} tokens")
    if rules.num_bytes > config.max_rules_bytes:
        bound = f"take {rules.num_bytes} bytes; at most {config.max_rules_bytes} fit into a plan"
        raise InvalidRequest("rules", bound)


def _ints(values: tuple[int, ...] | list[int]) -> IntArray:
    return np.array(values, dtype=np.int32)


def _check_ids(field: str, ids: IntArray, vocabulary_size: int) -> None:
    if len(ids):
        least, most = int(ids.min()), int(ids.max())
        if least < 0 or most >= vocabulary_size:
            token = least if least < 0 else most
            raise InvalidRequest(field, f"token id {token} is not within [0, {vocabulary_size})")
