"""The plan log survives the wire: what one end packs the other unpacks, whatever the values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import wire
from shared.logit_rules import LogitRules
from shared.pb import worker_pb2
from shared.types import Admission, RowSampling, StepPlan, StepResult, TokenMask

int32 = st.integers(-(2**31), 2**31 - 1)
uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
float32 = st.floats(width=32, allow_nan=False)


def arrays(columns: int = 0):
    row = st.lists(int32, min_size=columns, max_size=columns) if columns else int32
    shape = (-1, columns) if columns else (-1,)
    return st.lists(row, max_size=5).map(lambda rows: np.array(rows, dtype=np.int32).reshape(shape))


rules = st.builds(
    LogitRules,
    allowed=st.binary(max_size=4),
    bad_words=st.lists(st.lists(int32, max_size=3).map(tuple), max_size=3).map(tuple),
    bias=st.lists(st.tuples(int32, float32), max_size=3).map(tuple),
    repetition_penalty=float32,
    frequency_penalty=float32,
    presence_penalty=float32,
)
samplings = st.builds(
    RowSampling,
    temperature=float32,
    top_k=uint32,
    top_p=float32,
    min_p=float32,
    seed=uint64,
    min_tokens=uint32,
    suppressed_ids=st.lists(int32, max_size=3).map(tuple),
    rules=rules,
    logprobs=st.none() | uint32,
    prompt_logprobs=st.none() | uint32,
)
admissions = st.builds(
    Admission,
    slot=uint32,
    prompt_length=uint32,
    cached_length=uint32,
    known_length=uint32,
    block_ids=arrays(),
    sampling=samplings,
    cached_ids=arrays(),
    prompt_logprobs_from=uint32,
)
plans = st.builds(
    StepPlan,
    epoch=uint64,
    step_id=uint64,
    admitted=st.lists(admissions, max_size=3).map(tuple),
    grown=arrays(2),
    rows=arrays(3),
    token_ids=arrays(),
    masks=st.lists(st.builds(TokenMask, uint32, st.binary(max_size=8)), max_size=2).map(tuple),
    zeroed=arrays(),
)
results = st.builds(
    StepResult,
    epoch=uint64,
    step_id=uint64,
    token_ids=arrays(),
    failed_rows=arrays(),
    draining=st.booleans(),
    step_time_us=uint32,
    logprobs=st.binary(max_size=9),
    prompt_logprobs=st.binary(max_size=9),
)


def assert_same(one: object, other: object) -> None:
    """Field by field: arrays have no truth value of their own."""
    assert type(one) is type(other)
    for name in one.__dataclass_fields__:
        left, right = getattr(one, name), getattr(other, name)
        if isinstance(left, np.ndarray):
            assert left.shape == right.shape and left.tolist() == right.tolist(), name
        elif isinstance(left, tuple) and left and hasattr(left[0], "__dataclass_fields__"):
            assert len(left) == len(right)
            for mine, yours in zip(left, right, strict=True):
                assert_same(mine, yours)
        elif hasattr(left, "__dataclass_fields__"):
            assert_same(left, right)
        else:
            assert left == right, name


@given(plans, uint64)
def test_a_plan_survives_the_wire(plan: StepPlan, instance: int) -> None:
    received = worker_pb2.StepPlan.FromString(wire.plan_to_pb(plan, instance).SerializeToString())
    assert received.instance == instance
    assert_same(plan, wire.plan_from_pb(received))


@given(results, uint64)
def test_a_result_survives_the_wire(result: StepResult, instance: int) -> None:
    received = worker_pb2.StepResult.FromString(wire.result_to_pb(result, instance).SerializeToString())
    assert received.instance == instance
    assert_same(result, wire.result_from_pb(received))


def test_integers_travel_little_endian_whatever_the_machine() -> None:
    assert wire.pack(np.array([1, -2], dtype=np.int32)) == b"\x01\x00\x00\x00\xfe\xff\xff\xff"


def _ruled(**rules: bytes) -> worker_pb2.StepPlan:
    sampling = worker_pb2.RowSampling(rules=worker_pb2.LogitRules(**rules))
    return worker_pb2.StepPlan(admitted=[worker_pb2.Admission(sampling=sampling)])


@pytest.mark.parametrize(
    "message",
    [
        worker_pb2.StepPlan(rows=b"\0" * 8),
        worker_pb2.StepPlan(grown=b"\0" * 4),
        worker_pb2.StepPlan(token_ids=b"\0" * 3),
        _ruled(bad_words=wire.pack(np.array([3, 1, 2], dtype=np.int32))),
        _ruled(bad_words=wire.pack(np.array([-1], dtype=np.int32))),
        _ruled(bias_ids=b"\0" * 8, bias_values=b"\0" * 4),
    ],
)
def test_a_ragged_list_is_a_value_error(message: worker_pb2.StepPlan) -> None:
    with pytest.raises(ValueError):
        wire.plan_from_pb(message)
