"""Converts the plan log between values and protobuf: the only place that knows both."""

import numpy as np

from shared.pb import worker_pb2
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
    return worker_pb2.Admission(
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
            suppressed_ids=pack(np.array(sampling.suppressed_ids, dtype=np.int32)),
        ),
    )


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
        ),
    )


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
