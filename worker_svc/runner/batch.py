"""Batch state as a fold of step plans: what each slot holds, and the inputs of the step that a plan asks for.

Owns positions, block tables and sampling parameters by slot. Numpy only: it knows no torch, no model and no rank, so
every rank that folds the same plans holds the same state. Last sampled tokens are not here: they stay on the device.
"""

from dataclasses import dataclass, replace

import numpy as np

from shared.errors import InvalidRequest
from shared.types import NO_TRIPLES, Admission, IntArray, StepPlan
from worker_svc.runner.sampling_state import SamplingState
from worker_svc.runner.whole_inputs import step_inputs
from worker_svc.step_inputs import LongArray, SamplingInputs, StepInputs, StepRows


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds that a plan must keep."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    vocabulary_size: int

    @property
    def blocks_per_sequence(self) -> int:
        """Width of a block table."""
        return -(-self.max_model_len // self.block_size)


class BatchState:
    """state = fold(state, plan). An error leaves it undefined: reset it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.reset()

    def reset(self) -> None:
        """The state of a new epoch: every slot is free and step 1 is next."""
        slots = self.limits.max_num_seqs
        self._next_step = 1
        self._admitted = np.zeros(slots, dtype=bool)
        self._computed = np.zeros(slots, dtype=np.int64)
        self._known = np.zeros(slots, dtype=np.int64)
        self._length = np.zeros(slots, dtype=np.int64)
        self._num_blocks = np.zeros(slots, dtype=np.int64)
        self._tables = np.zeros((slots, self.limits.blocks_per_sequence), dtype=np.int32)
        self._sampling = SamplingState(slots, self.limits.vocabulary_size)
        self._last: StepRows | None = None
        self._last_plan = b""

    def fold(self, plan: StepPlan) -> StepRows:
        """Raises InvalidRequest, naming field and bound, for a plan that can't follow the ones before it."""
        if plan.step_id != self._next_step:
            raise InvalidRequest("step_id", f"{plan.step_id} where {self._next_step} is next")
        self._next_step += 1
        self._admit(plan.admitted)
        grown = self._grow(plan.grown)
        if len(plan.zeroed):
            _check_range("zeroed", plan.zeroed, self.limits.num_blocks)
        rows = self._repeat(plan, grown) or self._advance(plan, grown)
        self._check_ends(rows)
        ends = rows.starts + rows.counts
        self._computed[rows.slots] = ends
        self._length[rows.slots] += rows.samples
        self._last_plan, self._last = plan.rows.tobytes(), rows
        return rows

    def _admit(self, admitted: tuple[Admission, ...]) -> None:
        for index, admission in enumerate(admitted):
            _check_admission(f"admitted[{index}]", admission, self.limits)
            slot, blocks = admission.slot, admission.block_ids
            self._admitted[slot] = True
            self._computed[slot] = admission.cached_length
            self._known[slot] = self._length[slot] = admission.known_length
            self._num_blocks[slot] = len(blocks)
            self._tables[slot, : len(blocks)] = blocks
            self._sampling.admit(f"admitted[{index}]", admission)
        if len({admission.slot for admission in admitted}) != len(admitted):
            raise InvalidRequest("admitted", "a slot appears twice")

    def _grow(self, grown: IntArray) -> IntArray:
        if not len(grown):
            return NO_TRIPLES
        slots, blocks = grown.T
        self._check_slots("grown", slots)
        _check_range("grown", blocks, self.limits.num_blocks)
        columns = self._num_blocks[slots] + _earlier(slots)
        if (columns >= self.limits.blocks_per_sequence).any():
            raise InvalidRequest("grown", f"a slot gets more than {self.limits.blocks_per_sequence} blocks")
        self._tables[slots, columns] = blocks
        np.add.at(self._num_blocks, slots, 1)
        return np.stack((slots, columns, blocks), axis=1, dtype=np.int32)

    def _repeat(self, plan: StepPlan, grown: IntArray) -> StepRows | None:
        """The rows where they are those of the step before, one token further: what was checked then holds again."""
        last = self._last
        if last is None or not last.decodes or plan.admitted or plan.rows.tobytes() != self._last_plan:
            return None
        self._check_token_ids(plan.token_ids, last.known)
        return replace(last, starts=last.starts + 1, grown=grown, zeroed=plan.zeroed, masks=plan.masks, repeated=True)

    def _advance(self, plan: StepPlan, grown: IntArray) -> StepRows:
        slots, counts, known = plan.rows.T.astype(np.int64)
        self._check_rows(slots, counts, known)
        self._check_token_ids(plan.token_ids, known)
        starts = self._computed[slots]
        return StepRows(
            slots=slots,
            counts=counts,
            starts=starts,
            known=known,
            samples=starts + counts == self._length[slots],
            token_ids=plan.token_ids,
            grown=grown,
            zeroed=plan.zeroed,
            masks=plan.masks,
            decodes=bool(len(slots)) and not known.any(),
            repeated=False,
        )

    def sampling(self, rows: StepRows) -> SamplingInputs:
        """Of the step folded last. Raises InvalidRequest for a mask that fits no sampling row."""
        ends, samples = rows.starts + rows.counts, rows.samples
        return self._sampling.inputs(
            rows.slots[samples], np.cumsum(rows.counts)[samples] - 1, ends[samples], rows.masks
        )

    def inputs(self, rows: StepRows) -> StepInputs:
        """All inputs of the step folded last. Raises as `sampling` does."""
        tables, num_blocks = self._tables[rows.slots], self._num_blocks[rows.slots]
        return step_inputs(rows, tables, num_blocks, self.limits.block_size, self.sampling(rows))

    def _check_slots(self, field: str, slots: IntArray | LongArray) -> None:
        _check_range(field, slots, self.limits.max_num_seqs, "slot")
        if not self._admitted[slots].all():
            free = slots[~self._admitted[slots]][0]
            raise InvalidRequest(field, f"slot {free} holds no sequence")

    def _check_rows(self, slots: LongArray, counts: LongArray, known: LongArray) -> None:
        self._check_slots("rows", slots)
        if len(np.unique(slots)) != len(slots):
            raise InvalidRequest("rows", "a slot has two rows")
        if (counts < 1).any():
            raise InvalidRequest("rows", "a row has no token")
        if counts.sum() > self.limits.max_num_batched_tokens:
            raise InvalidRequest("rows", f"{counts.sum()} tokens; at most {self.limits.max_num_batched_tokens} fit")
        if not ((known == counts) | ((known == 0) & (counts == 1))).all():
            raise InvalidRequest("rows", "known ids are all of a row's tokens, or none of one token")
        unsampled = (known == 0) & (self._length[slots] == self._known[slots])
        if unsampled.any():
            raise InvalidRequest("rows", f"slot {slots[unsampled][0]} has sampled no token to continue from")

    def _check_token_ids(self, token_ids: IntArray, known: LongArray) -> None:
        if len(token_ids):
            _check_range("token_ids", token_ids, self.limits.vocabulary_size)
        if known.sum() != len(token_ids):
            raise InvalidRequest("token_ids", f"{len(token_ids)} ids for {known.sum()} known tokens")

    def _check_ends(self, rows: StepRows) -> None:
        slots, ends = rows.slots, rows.starts + rows.counts
        bounds = (
            (self._length[slots], "tokens of its sequence"),
            (self._num_blocks[slots] * self.limits.block_size, "tokens of its blocks"),
            (self.limits.max_model_len, "tokens of the context"),
        )
        for bound, what in bounds:
            if (ends > bound).any():
                raise InvalidRequest("rows", f"slot {slots[ends > bound][0]} goes beyond the {what}")


def _earlier(slots: IntArray) -> LongArray:
    """[n]: how many times each element came before."""
    if len(set(slots.tolist())) == len(slots):
        return np.zeros(len(slots), dtype=np.int64)
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    earlier = np.empty(len(slots), dtype=np.int64)
    earlier[order] = np.arange(len(slots)) - np.searchsorted(ordered, ordered)
    return earlier


def _check_range(field: str, values: IntArray | LongArray, bound: int, what: str = "id") -> None:
    wrong = (values < 0) | (values >= bound)
    if wrong.any():
        raise InvalidRequest(field, f"{what} {values[wrong][0]} is not within [0, {bound})")


def _check_admission(field: str, admission: Admission, limits: Limits) -> None:
    if not 0 <= admission.slot < limits.max_num_seqs:
        raise InvalidRequest(field, f"slot {admission.slot} is not within [0, {limits.max_num_seqs})")
    if not 0 < admission.prompt_length <= admission.known_length <= limits.max_model_len:
        raise InvalidRequest(
            field,
            f"prompt_length {admission.prompt_length} and known_length {admission.known_length} are not in order "
            f"within [1, {limits.max_model_len}]",
        )
    if not 0 <= admission.cached_length < admission.known_length:
        raise InvalidRequest(field, f"cached_length {admission.cached_length} is not below the known length")
    if len(admission.block_ids) != -(-admission.cached_length // limits.block_size):
        raise InvalidRequest(field, f"{len(admission.block_ids)} blocks for {admission.cached_length} cached tokens")
    _check_range(field, admission.block_ids, limits.num_blocks, "block")
