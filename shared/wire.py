"""Converts the plan log between values and protobuf: the only place that knows both."""

from collections.abc import Iterable

import numpy as np

from shared.logit_rules import NO_RULES, LogitRules
from shared.pb import core_pb2, worker_pb2
from shared.types import (
    Admission,
    IntArray,
    RowSampling,
    StepPlan,
    StepResult,
    TokenMask,
    WorkerDescription,
)

LITTLE_INT32 = np.dtype("<i4")
_LITTLE_FLOAT32 = np.dtype("<f4")


def pack(values: IntArray) -> bytes:
    """int32 values as little-endian bytes."""
    return values.astype(LITTLE_INT32, copy=False).tobytes()


def unpack(data: bytes, columns: int = 0) -> IntArray:
    """Little-endian int32 bytes as a read-only array, [n] or [n, columns]. Raises ValueError on a ragged length."""
    values: IntArray = np.frombuffer(data, dtype=LITTLE_INT32)
    return values.reshape(-1, columns) if columns else values


def plan_to_pb(plan: StepPlan, instance: int) -> worker_pb2.StepPlan:
    """`instance` is the scheduler process that sends it."""
    message = worker_pb2.StepPlan(
        instance=instance,
        epoch=plan.epoch,
        step_id=plan.step_id,
        grown=pack(plan.grown),
        rows=pack(plan.rows),
        token_ids=pack(plan.token_ids),
        zeroed=pack(plan.zeroed),
    )
    for admission in plan.admitted:
        message.admitted.append(_admission_to_pb(admission))
    for mask in plan.masks:
        message.masks.add(slot=mask.slot, allowed=mask.allowed)
    return message


def plan_from_pb(message: worker_pb2.StepPlan) -> StepPlan:
    """Raises ValueError where the message is not a plan."""
    return StepPlan(
        epoch=message.epoch,
        step_id=message.step_id,
        admitted=tuple(_admission_from_pb(admission) for admission in message.admitted),
        grown=unpack(message.grown, 2),
        rows=unpack(message.rows, 3),
        token_ids=unpack(message.token_ids),
        masks=tuple(TokenMask(mask.slot, mask.allowed) for mask in message.masks),
        zeroed=unpack(message.zeroed),
    )


def _admission_to_pb(admission: Admission) -> worker_pb2.Admission:
    sampling = admission.sampling
    message = worker_pb2.Admission(
        slot=admission.slot,
        prompt_length=admission.prompt_length,
        cached_length=admission.cached_length,
        known_length=admission.known_length,
        block_ids=pack(admission.block_ids),
        sampling=worker_pb2.RowSampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            min_tokens=sampling.min_tokens,
            suppressed_ids=_pack_list(sampling.suppressed_ids),
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
        ),
        cached_ids=pack(admission.cached_ids),
        prompt_logprobs_from=admission.prompt_logprobs_from,
    )
    if sampling.rules != NO_RULES:
        message.sampling.rules.CopyFrom(rules_to_pb(sampling.rules))
    return message


def _admission_from_pb(message: worker_pb2.Admission) -> Admission:
    sampling = message.sampling
    return Admission(
        slot=message.slot,
        prompt_length=message.prompt_length,
        cached_length=message.cached_length,
        known_length=message.known_length,
        block_ids=unpack(message.block_ids),
        sampling=RowSampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            min_tokens=sampling.min_tokens,
            suppressed_ids=tuple(unpack(sampling.suppressed_ids).tolist()),
            rules=rules_from_pb(sampling),
            logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
            prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
        ),
        cached_ids=unpack(message.cached_ids),
        prompt_logprobs_from=message.prompt_logprobs_from,
    )


def rules_to_pb(rules: LogitRules) -> worker_pb2.LogitRules:
    """For `rules` of either protocol."""
    tokens, values = [token for token, _ in rules.bias], [value for _, value in rules.bias]
    return worker_pb2.LogitRules(
        allowed=rules.allowed,
        bad_words=_pack_list([number for word in rules.bad_words for number in (len(word), *word)]),
        bias_ids=_pack_list(tokens),
        bias_values=np.array(values, dtype=_LITTLE_FLOAT32).tobytes(),
        repetition_penalty=rules.repetition_penalty,
        frequency_penalty=rules.frequency_penalty,
        presence_penalty=rules.presence_penalty,
    )


def rules_from_pb(sampling: worker_pb2.RowSampling | core_pb2.SequenceSampling) -> LogitRules:
    """Its `rules`. Raises ValueError where their lists are none."""
    if not sampling.HasField("rules"):
        return NO_RULES
    rules = sampling.rules
    values = np.frombuffer(rules.bias_values, dtype=_LITTLE_FLOAT32).tolist()
    return LogitRules(
        allowed=rules.allowed,
        bad_words=_words(unpack(rules.bad_words).tolist()),
        bias=tuple(zip(unpack(rules.bias_ids).tolist(), values, strict=True)),
        repetition_penalty=rules.repetition_penalty,
        frequency_penalty=rules.frequency_penalty,
        presence_penalty=rules.presence_penalty,
    )


def _words(numbers: list[int]) -> tuple[tuple[int, ...], ...]:
    words: list[tuple[int, ...]] = []
    at = 0
    while at < len(numbers):
        end = at + 1 + numbers[at]
        if not at < end <= len(numbers):
            raise ValueError(f"bad_words: a length of {numbers[at]} with {len(numbers) - at - 1} numbers left")
        words.append(tuple(numbers[at + 1 : end]))
        at = end
    return tuple(words)


def _pack_list(values: Iterable[int]) -> bytes:
    return pack(np.array([*values], dtype=np.int32))


def result_to_pb(result: StepResult, instance: int) -> worker_pb2.StepResult:
    """`instance` is copied from the plan."""
    return worker_pb2.StepResult(
        instance=instance,
        epoch=result.epoch,
        step_id=result.step_id,
        token_ids=pack(result.token_ids),
        failed_rows=pack(result.failed_rows),
        draining=result.draining,
        step_time_us=result.step_time_us,
        logprobs=result.logprobs,
        prompt_logprobs=result.prompt_logprobs,
    )


def result_from_pb(message: worker_pb2.StepResult) -> StepResult:
    """Raises ValueError where the message is not a result."""
    return StepResult(
        epoch=message.epoch,
        step_id=message.step_id,
        token_ids=unpack(message.token_ids),
        failed_rows=unpack(message.failed_rows),
        draining=message.draining,
        step_time_us=message.step_time_us,
        logprobs=message.logprobs,
        prompt_logprobs=message.prompt_logprobs,
    )


def description_to_pb(description: WorkerDescription) -> worker_pb2.DescribeResponse:
    """The answer to Describe."""
    return worker_pb2.DescribeResponse(
        **{name: getattr(description, name) for name in WorkerDescription.__dataclass_fields__}
    )


def description_from_pb(message: worker_pb2.DescribeResponse) -> WorkerDescription:
    """The inverse of description_to_pb."""
    values = {name: getattr(message, name) for name in WorkerDescription.__dataclass_fields__}
    return WorkerDescription(**{**values, "eos_token_ids": tuple(message.eos_token_ids)})
