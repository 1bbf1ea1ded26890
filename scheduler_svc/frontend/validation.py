"""What a Generate request may ask for: every field is checked here, and refused by name with its bound.

Turns a request into the core's submissions, resolved: nothing after it asks for a default. Does no I/O.
"""

from collections.abc import Sequence

import numpy as np

from scheduler_svc.frontend.bounds import at_most, checked_ids, within
from scheduler_svc.frontend.rules import check_rules, resolve_rules
from scheduler_svc.frontend.seeds import derive_seed
from shared.errors import InvalidRequest
from shared.logit_rules import NO_RULES
from shared.logprobs import MOST_LOGPROBS
from shared.model_config import SamplingDefaults
from shared.pb import core_pb2
from shared.pb import generation_pb2 as pb
from shared.types import IntArray
from shared.wire import pack, rules_to_pb

MAX_SAMPLES = 128
MAX_NAME_BYTES = 256
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_TEMPERATURE = 100.0
_UINT32 = 1 << 32


def check_request(request: pb.GenerateRequest, model: core_pb2.ServedModel) -> None:
    """Checks all that needs no tokenizer, lengths before contents. Raises InvalidRequest."""
    if request.WhichOneof("prompt") is None:
        raise InvalidRequest("prompt", "one of text, token_ids and chat is required")
    if request.WhichOneof("prompt") == "text" and not request.text:
        raise InvalidRequest("text", "must not be empty")
    _check_length("token_ids", len(request.token_ids.ids), model.context_limit)
    at_most("output_token_ids", len(request.output_token_ids.ids), model.context_limit, "ids")
    for field in ("request_id", "cache_salt"):
        at_most(field, len(getattr(request, field).encode()), MAX_NAME_BYTES, "bytes")
    _check_samples(request)
    _check_sampling(request.sampling)
    check_rules(request.sampling, model.vocabulary_size)
    for name in ("logprobs", "prompt_logprobs"):
        within(f"output.{name}", getattr(request.output, name), 0, MOST_LOGPROBS)
    _check_stopping(request.stopping, model.vocabulary_size)
    if request.HasField("constraint"):
        _check_beside_constraint(request)


def _check_beside_constraint(request: pb.GenerateRequest) -> None:
    """What could leave nothing to sample where a grammar allows little."""
    if request.stopping.ignore_eos:
        raise InvalidRequest("stopping.ignore_eos", "must be unset with a constraint, which ends with such a token")
    if request.sampling.HasField("allowed_token_ids"):
        raise InvalidRequest(
            "sampling.allowed_token_ids", "must be unset with a constraint, which says what is allowed"
        )
    if request.sampling.bad_words:
        raise InvalidRequest("sampling.bad_words", "must be empty with a constraint, which says what is allowed")


def _check_length(prompt: str, tokens: int, context_limit: int) -> None:
    if tokens >= context_limit:
        raise InvalidRequest(prompt, f"has {tokens} tokens; must be fewer than the context limit, {context_limit}")


def _check_samples(request: pb.GenerateRequest) -> None:
    within("n", request.n, 0, MAX_SAMPLES)
    samples = request.n or 1
    within("sample_index", request.sample_index, 0, _UINT32 - samples)
    if samples > 1 and request.output_token_ids.ids:
        raise InvalidRequest("output_token_ids", "requires n = 1; resume each sample by its sample_index")


def _check_sampling(sampling: pb.SamplingParams) -> None:
    if sampling.HasField("temperature"):
        within("sampling.temperature", sampling.temperature, 0, MAX_TEMPERATURE)
    if sampling.HasField("top_k"):
        within("sampling.top_k", sampling.top_k, 0, (1 << 31) - 1)
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        raise InvalidRequest("sampling.top_p", f"must be within (0, 1], is {sampling.top_p:g}")
    if sampling.HasField("min_p"):
        within("sampling.min_p", sampling.min_p, 0, 1)


def _check_stopping(stopping: pb.StoppingParams, vocabulary_size: int) -> None:
    if stopping.HasField("max_tokens"):
        within("stopping.max_tokens", stopping.max_tokens, 1, _UINT32 - 1)
        if stopping.min_tokens > stopping.max_tokens:
            bound = f"must be at most max_tokens, {stopping.max_tokens}, is {stopping.min_tokens}"
            raise InvalidRequest("stopping.min_tokens", bound)
    at_most("stopping.stop", len(stopping.stop), MAX_STOP_STRINGS, "strings")
    for index, stop in enumerate(stopping.stop):
        within(f"stopping.stop[{index}]", len(stop.encode()), 1, MAX_STOP_STRING_BYTES, " bytes")
    at_most("stopping.stop_token_ids", len(stopping.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids")
    checked_ids("stopping.stop_token_ids", stopping.stop_token_ids, vocabulary_size)


def submissions(
    request: pb.GenerateRequest,
    request_id: str,
    seed: int,
    prompt: IntArray,
    bad_words: Sequence[tuple[int, ...]],
    model: core_pb2.ServedModel,
    defaults: SamplingDefaults,
) -> list[core_pb2.Submit]:
    """One submission for each sample of a checked request, whose prompt and bad_words are tokenized.

    Raises InvalidRequest where the prompt doesn't fit, or nothing is left to sample.
    """
    output = checked_ids("output_token_ids", request.output_token_ids.ids, model.vocabulary_size)
    room = _room(request, prompt, output, model.context_limit)
    stopping, constrained = request.stopping, request.HasField("constraint")
    stop_token_ids = _stop_token_ids(stopping, model)
    held_back = stop_token_ids.tolist() if stopping.min_tokens else ()
    rules = resolve_rules(request.sampling, defaults, model.vocabulary_size, bad_words, held_back)
    first = core_pb2.Submit(
        request_id=request_id,
        prompt=pack(prompt),
        output=pack(output),
        sampling=_resolved(request.sampling, defaults, model.vocabulary_size),
        max_tokens=min(stopping.max_tokens, room) if stopping.HasField("max_tokens") else 0,
        min_tokens=0 if constrained else min(stopping.min_tokens, room),
        stop_token_ids=pack(stop_token_ids),
        cache_salt=request.cache_salt,
        priority=request.priority,
        constrained=constrained,
    )
    if rules != NO_RULES:
        first.sampling.rules.CopyFrom(rules_to_pb(rules))
    if request.output.HasField("logprobs"):
        first.sampling.logprobs = min(request.output.logprobs, model.vocabulary_size)
    if request.output.HasField("prompt_logprobs") and not output.size:
        first.sampling.prompt_logprobs = min(request.output.prompt_logprobs, model.vocabulary_size)
    return [_sample(first, seed, request.sample_index + i, is_first=i == 0) for i in range(request.n or 1)]


def _room(request: pb.GenerateRequest, prompt: IntArray, output: IntArray, context_limit: int) -> int:
    """Output tokens that the context has room for."""
    field = request.WhichOneof("prompt") or "prompt"
    if not prompt.size:
        raise InvalidRequest(field, "has no tokens")
    _check_length(field, prompt.size, context_limit)
    room = context_limit - prompt.size
    at_most("output_token_ids", output.size, room, "ids")
    return room


def _resolved(
    sampling: pb.SamplingParams, defaults: SamplingDefaults, vocabulary_size: int
) -> core_pb2.SequenceSampling:
    top_k = sampling.top_k if sampling.HasField("top_k") else defaults.top_k
    return core_pb2.SequenceSampling(
        temperature=sampling.temperature if sampling.HasField("temperature") else defaults.temperature,
        top_k=top_k if top_k < vocabulary_size else 0,
        top_p=sampling.top_p if sampling.HasField("top_p") else defaults.top_p,
        min_p=sampling.min_p if sampling.HasField("min_p") else defaults.min_p,
    )


def _stop_token_ids(stopping: pb.StoppingParams, model: core_pb2.ServedModel) -> IntArray:
    eos = () if stopping.ignore_eos else model.eos_token_ids
    return np.array(sorted({*stopping.stop_token_ids, *eos}), dtype=np.int32)


def _sample(first: core_pb2.Submit, seed: int, index: int, *, is_first: bool) -> core_pb2.Submit:
    submission = core_pb2.Submit()
    submission.CopyFrom(first)
    submission.sample_index = index
    submission.sampling.seed = derive_seed(seed, index)
    if not is_first:
        submission.sampling.ClearField("prompt_logprobs")  # they are the same for all
    return submission
