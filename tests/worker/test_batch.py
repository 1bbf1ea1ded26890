"""The fold of plans: equal to a naive one over random plans, and every malformed plan is refused by name.

Needs no torch: the fold is numpy alone.
"""

import dataclasses
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidRequest
from shared.types import Admission, RowSampling, StepPlan, TokenMask
from worker_svc.runner.batch import BatchState, Limits
from worker_svc.step_inputs import StepInputs

LIMITS = Limits(
    max_num_seqs=4, max_num_batched_tokens=24, max_model_len=30, block_size=4, num_blocks=50, vocabulary_size=20
)


def array(values: object, columns: int = 0) -> Any:
    result = np.array(values, dtype=np.int32)
    return result.reshape(-1, columns) if columns else result


def admission(slot: int = 0, length: int = 6, blocks: tuple[int, ...] = (), **changes: Any) -> Admission:
    values = {"slot": slot, "prompt_length": length, "cached_length": len(blocks) * 4, "known_length": length}
    return Admission(**{**values, "block_ids": array(blocks), "sampling": RowSampling(), **changes})


def first_plan(**changes: Any) -> StepPlan:
    """Slot 0 takes a prompt of 6 tokens, all computed, so it samples."""
    plan = StepPlan(
        epoch=1,
        step_id=1,
        admitted=(admission(),),
        grown=array([[0, 7], [0, 3]]),
        rows=array([[0, 6, 6]]),
        token_ids=array([1, 2, 3, 4, 5, 6]),
    )
    return dataclasses.replace(plan, **changes)


class NaiveBatch:
    """One Python object per slot, one step per token."""

    def __init__(self) -> None:
        self.slots: dict[int, dict[str, Any]] = {}

    def apply(self, plan: StepPlan) -> dict[str, list[Any]]:
        for a in plan.admitted:
            self.slots[a.slot] = {"blocks": a.block_ids.tolist(), "computed": a.cached_length, "length": a.known_length}
        for slot, block in plan.grown.tolist():
            self.slots[slot]["blocks"].append(block)
        ids = iter(plan.token_ids.tolist())
        out: dict[str, list[Any]] = {"tokens": [], "positions": [], "mapping": [], "lens": [], "samples": [], "at": []}
        for slot, count, known in plan.rows.tolist():
            state = self.slots[slot]
            for position in range(state["computed"], state["computed"] + count):
                out["tokens"].append(next(ids) if known else ("last", slot))
                out["positions"].append(position)
                out["mapping"].append(state["blocks"][position // 4] * 4 + position % 4)
            state["computed"] += count
            out["lens"].append(state["computed"])
            if state["computed"] == state["length"]:
                out["samples"].append((slot, len(out["tokens"]) - 1))
                out["at"].append(state["length"])
                state["length"] += 1
        return out


def random_plans(rng: random.Random, count: int) -> list[StepPlan]:
    """Well-formed ones: slots are taken, grow as they are computed, sample, and are taken again.

    In some steps whoever can go on does, in the order of the step before, so that the same rows come several times.
    """
    live: dict[int, list[int]] = {}  # slot: [computed, length, known, blocks]
    plans, order = [], list(range(4))
    for step_id in range(1, count + 1):
        admitted, grown, rows, ids, budget = [], [], [], [], 24
        settled = rng.random() < 0.7
        order = order if settled else rng.sample(range(4), 4)
        for slot in order:
            if slot not in live or (not settled and rng.random() < 0.2):
                length, cached = rng.randint(1, 20), 0
                cached = rng.randint(0, (length - 1) // 4)
                admitted.append(admission(slot, length, tuple(rng.choices(range(50), k=cached))))
                live[slot] = [cached * 4, length, length, cached]
            state = live[slot]
            fresh = state[0] == state[1] - 1 and state[1] > state[2]
            n = min(8 if settled else rng.randint(0, 8), state[1] - state[0], budget, 30 - state[0])
            if n <= 0:
                continue
            while state[3] * 4 < state[0] + n:
                grown.append((slot, rng.randrange(50)))
                state[3] += 1
            known = 0 if fresh and (settled or rng.random() < 0.8) else n
            rows.append((slot, n, known))
            ids += rng.choices(range(20), k=known)
            state[0], budget = state[0] + n, budget - n
            state[1] += state[0] == state[1]
        plans.append(StepPlan(1, step_id, tuple(admitted), array(grown, 2), array(rows, 3), array(ids)))
    return plans


def step_inputs(batch: BatchState, plan: StepPlan) -> StepInputs:
    """All that a plan is checked for is checked here."""
    return batch.inputs(batch.fold(plan))


@given(st.integers(0, 2**32))
def test_equal_to_a_naive_fold(seed: int) -> None:
    batch, naive = BatchState(LIMITS), NaiveBatch()
    for plan in random_plans(random.Random(seed), 20):
        inputs, expected = step_inputs(batch, plan), naive.apply(plan)
        tokens: list[Any] = inputs.token_ids.tolist()
        for index, slot in zip(inputs.feedback_index.tolist(), inputs.feedback_slots.tolist(), strict=True):
            tokens[index] = ("last", slot)
        assert tokens == expected["tokens"]
        assert inputs.positions.tolist() == expected["positions"]
        assert inputs.slot_mapping.tolist() == expected["mapping"]
        assert inputs.seq_lens.tolist() == expected["lens"]
        assert inputs.cu_seqlens.tolist() == np.cumsum([0, *plan.rows[:, 1]]).tolist()
        sampling = inputs.sampling
        assert list(zip(sampling.slots.tolist(), sampling.last_index.tolist(), strict=True)) == expected["samples"]
        assert sampling.positions.tolist() == expected["at"]
        for row, slot in enumerate(plan.rows[:, 0].tolist()):
            blocks = naive.slots[slot]["blocks"]
            table = inputs.block_tables[row].tolist()
            assert table == blocks + blocks[:1] * (len(table) - len(blocks))


def test_admission_forgets_what_the_slot_held() -> None:
    batch = BatchState(LIMITS)
    step_inputs(batch, first_plan())
    again = step_inputs(batch, first_plan(step_id=2, grown=array([[0, 9], [0, 8]])))
    assert again.slot_mapping.tolist() == [36, 37, 38, 39, 32, 33]
    assert again.sampling.positions.tolist() == [6]


BAD_SAMPLING = [
    {"temperature": -1.0},
    {"temperature": float("nan")},
    {"temperature": float("inf")},
    {"top_p": 0.0},
    {"top_p": 1.5},
    {"min_p": float("nan")},
    {"suppressed_ids": (20,)},
    {"suppressed_ids": (-1,)},
]

BAD_ADMISSIONS = [
    {"slot": 4},
    {"prompt_length": 0},
    {"prompt_length": 7},
    {"known_length": 31},
    {"cached_length": 6, "block_ids": array([1, 2])},
    {"cached_length": 4},
    {"cached_length": 4, "block_ids": array([50])},
    {"cached_length": 4, "block_ids": array([-1])},
    *({"sampling": RowSampling(**bad)} for bad in BAD_SAMPLING),
]


@pytest.mark.parametrize("changes", BAD_ADMISSIONS, ids=str)
def test_bad_admissions(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"admitted\[0\]"):
        step_inputs(BatchState(LIMITS), first_plan(admitted=(admission(**changes),)))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("step_id", {"step_id": 2}),
        ("step_id", {"step_id": 0}),
        ("admitted", {"admitted": (admission(), admission())}),
        ("grown", {"grown": array([[0, 50]])}),
        ("grown", {"grown": array([[0, -1]])}),
        ("grown", {"grown": array([[4, 1]])}),
        ("grown", {"grown": array([[-1, 1]])}),
        ("grown", {"grown": array([[1, 1]])}),
        ("grown", {"grown": array([[0, 1]] * 9)}),
        ("zeroed", {"zeroed": array([50])}),
        ("rows", {"rows": array([[1, 6, 6]])}),
        ("rows", {"rows": array([[9, 6, 6]])}),
        ("rows", {"rows": array([[0, 3, 3], [0, 3, 3]])}),
        ("rows", {"rows": array([[0, 0, 0]]), "token_ids": array([])}),
        ("rows", {"rows": array([[0, 6, 3]]), "token_ids": array([1, 2, 3])}),
        ("rows", {"rows": array([[0, 6, 0]]), "token_ids": array([])}),
        ("rows", {"rows": array([[0, 1, 0]]), "token_ids": array([])}),
        ("rows", {"rows": array([[0, 7, 7]]), "token_ids": array([1] * 7)}),
        ("rows", {"rows": array([[0, 25, 25]]), "token_ids": array([1] * 25)}),
        ("rows", {"grown": array([[0, 7]])}),
        ("token_ids", {"token_ids": array([1, 2, 3, 4, 5])}),
        ("token_ids", {"token_ids": array([1, 2, 3, 4, 5, 20])}),
        ("token_ids", {"token_ids": array([1, 2, 3, 4, 5, -6])}),
        ("masks", {"masks": (TokenMask(1, bytes(3)),)}),
        ("masks", {"masks": (TokenMask(0, bytes(2)),)}),
    ],
    ids=str,
)
def test_bad_plans(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}"):
        step_inputs(BatchState(LIMITS), first_plan(**changes))


@pytest.mark.parametrize(
    ("problem", "changes"),
    [
        ("rows: slot 0 has sampled no token", {"admitted": (admission(length=3),), "grown": array([[0, 9]])}),
        ("rows: slot 0 goes beyond the tokens of its blocks", {}),
        ("token_ids: 1 ids for 0 known", {"token_ids": array([4]), "grown": array([[0, 9]])}),
        ("masks: slot 1 does not sample", {"masks": (TokenMask(1, bytes(3)),), "grown": array([[0, 9]])}),
    ],
    ids=["admitted again", "no block", "known ids", "mask"],
)
def test_rows_that_come_again_are_checked_again(problem: str, changes: dict[str, Any]) -> None:
    batch = BatchState(LIMITS)
    step_inputs(batch, first_plan())
    for step_id in (2, 3):
        step_inputs(batch, StepPlan(1, step_id, rows=array([[0, 1, 0]])))
    with pytest.raises(InvalidRequest, match=f"^{problem}"):
        step_inputs(batch, StepPlan(1, 4, rows=array([[0, 1, 0]]), **changes))


def test_a_row_beyond_the_context() -> None:
    batch = BatchState(LIMITS)
    blocks = array([[0, block] for block in range(8)])
    step_inputs(
        batch,
        first_plan(
            admitted=(admission(length=24),), grown=blocks, rows=array([[0, 24, 24]]), token_ids=array([1] * 24)
        ),
    )
    for step_id in range(2, 8):
        step_inputs(batch, StepPlan(1, step_id, rows=array([[0, 1, 0]])))
    with pytest.raises(InvalidRequest, match="context"):
        step_inputs(batch, StepPlan(1, 8, rows=array([[0, 1, 0]])))


def test_the_fold_needs_no_torch() -> None:
    code = "import sys, worker_svc.runner.batch, worker_svc.main; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
