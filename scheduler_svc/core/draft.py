"""A plan while it is built: what goes into it, in the order of the log, and how much room is left. Decides nothing."""

from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.batch import DecodeRows
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.group import CachedPrefix, Group, PendingPlan
from scheduler_svc.core.logprobs import PromptRow, prompt_row
from scheduler_svc.core.request import Sequence
from shared.types import NO_INTS, NO_PAIRS, Admission, IntArray, StepPlan, TokenMask, ints

ADMISSION_BYTES = 192
"""At most what an admission takes on the wire beside its lists."""
MASK_BYTES = 16
"""At most what a mask takes on the wire beside its bits."""
ROW_BYTES = 24
"""A row and a block that it begins: its pair, and its id again where it is to be zeroed."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row of known tokens."""

    slot: int
    token_ids: IntArray
    """[count]"""
    samples: bool


class PlanDraft:
    """One plan of one group."""

    def __init__(self, group: Group, config: CoreConfig) -> None:
        self.tokens_left = config.max_plan_tokens
        self.bytes_left = config.max_plan_bytes // 2  # the other half is for tokens: see CoreConfig.max_plan_tokens
        self.bytes_left -= ROW_BYTES * config.max_num_seqs
        self.preempted = False
        """A running sequence gave way: nobody is admitted by this plan."""
        self.starved: list[Sequence] = []
        """Running sequences that got no blocks for their next row."""
        self.granted: dict[Sequence, int] = {}
        """Running sequences that got blocks, with the known tokens of their row: 0 for a decode row."""
        self._group = group
        self._decode: DecodeRows | None = None
        self._chunks: list[Chunk] = []
        self._admitted: list[Admission] = []
        self._grown: list[tuple[int, int]] = []
        self._zeroed: list[int] = []
        self._masks: list[TokenMask] = []
        self._prompt_rows: list[PromptRow] = []

    def grow(self, sequence: Sequence, count: int) -> None:
        """Gives the sequence `count` free blocks for its row."""
        blocks = self._group.grow(sequence, count)
        self._grown += [(sequence.slot, block) for block in blocks]
        self._zeroed += self._group.pool.pop_tainted(blocks)

    def claim(self, size: int) -> bool:
        """Takes so many of the bytes left, if they are there."""
        if size > self.bytes_left:
            return False
        self.bytes_left -= size
        return True

    def admit(self, sequence: Sequence, tokens: IntArray, cached: CachedPrefix) -> None:
        """The sequence with these known tokens takes a slot."""
        self._group.admit(sequence, tokens, cached)
        looks_back = sequence.request.rules.looks_back
        self._admitted.append(
            Admission(
                slot=sequence.slot,
                prompt_length=len(sequence.request.prompt),
                cached_length=cached.length,
                known_length=len(tokens),
                block_ids=np.array(cached.blocks, dtype=np.int32),
                sampling=sequence.sampling,
                cached_ids=tokens[: cached.length] if looks_back else NO_INTS,
                prompt_logprobs_from=sequence.prompt_logprobs_from,
            )
        )

    def decode(self) -> None:
        """Adds a row for every decoding slot."""
        batch, masked = self._group.batch, self._group.masked
        rows = batch.decode_rows()
        if not len(rows.slots):
            return
        self._decode = rows
        self.tokens_left -= len(rows.slots)
        drained = batch.advance_decode(rows)
        constrained = [slot for slot in masked if batch.decoding[slot]]
        for slot in constrained:
            self._mask(masked.pop(slot))
        for slot in (*drained, *constrained):
            batch.set_decoding(slot, False)
        self._group.publish_ready()

    def compute(self, sequence: Sequence, count: int) -> None:
        """Adds a row of the sequence's next `count` known tokens.

        The blocks that it completes are published at once: who is admitted by the same plan may share them.
        """
        group, batch, slot = self._group, self._group.batch, sequence.slot
        start = int(batch.computed[slot])
        samples = start + count == batch.known[slot]
        self._chunks.append(Chunk(slot, batch.tokens[slot, start : start + count], samples))
        if logged := prompt_row(sequence, int(batch.generations[slot]), start, count):
            self._prompt_rows.append(logged)
        self.tokens_left -= count
        batch.computed[slot] = start + count
        sequence.last_chunk_step = group.step_id + 1
        if samples:
            batch.length[slot] += 1
            del group.prefilling[slot]
            if sequence.request.constrained:
                self._mask(sequence)
            else:
                batch.set_decoding(slot, not batch.is_drained(slot))
        group.publish(sequence)

    def _mask(self, sequence: Sequence) -> None:
        assert sequence.mask is not None, f"sequence {sequence.request.key} has no mask"
        self._masks.append(TokenMask(sequence.slot, sequence.mask))

    def finish(self) -> StepPlan | None:
        """The group's next plan, or None where there is nothing to compute."""
        if self._decode is None and not self._chunks:
            return None
        group = self._group
        group.step_id += 1
        group.pending.append(self._pending())
        return StepPlan(
            epoch=group.epoch,
            step_id=group.step_id,
            admitted=tuple(self._admitted),
            grown=np.array(self._grown, dtype=np.int32) if self._grown else NO_PAIRS,
            rows=self._rows(),
            token_ids=np.concatenate([chunk.token_ids for chunk in self._chunks]) if self._chunks else NO_INTS,
            masks=tuple(self._masks),
            zeroed=np.array(self._zeroed, dtype=np.int32) if self._zeroed else NO_INTS,
        )

    def _rows(self) -> IntArray:
        if not self._chunks and self._decode is not None:
            return self._decode.rows
        chunks = [(chunk.slot, len(chunk.token_ids), len(chunk.token_ids)) for chunk in self._chunks]
        decode = self._decode.rows if self._decode is not None else ints(0, 3)
        return np.concatenate((decode, np.array(chunks, dtype=np.int32)))

    def _pending(self) -> PendingPlan:
        group, batch, decode = self._group, self._group.batch, self._decode
        sampling = [chunk.slot for chunk in self._chunks if chunk.samples]
        if decode is not None and not sampling:
            slots, generations, keys = decode.slots, decode.generations, decode.keys
        else:
            slots = np.array(sampling, dtype=np.intp)
            if decode is not None:
                slots = np.concatenate((decode.slots, slots))
            generations, keys = batch.generations[slots], batch.keys[slots]
        sizes = batch.logprob_sizes_of(slots)
        return PendingPlan(group.step_id, slots, generations, keys, batch.departures, sizes, tuple(self._prompt_rows))


def admission_bytes(sequence: Sequence, cached: CachedPrefix) -> int:
    """At most what the sequence's admission takes on the wire."""
    sampling = sequence.sampling
    told = cached.length if sampling.rules.looks_back else 0
    numbers = len(cached.blocks) + len(sampling.suppressed_ids) + told
    return ADMISSION_BYTES + 4 * numbers + sampling.rules.num_bytes


def mask_bytes(sequence: Sequence) -> int:
    """At most what the mask for the sequence's next token takes on the wire, if it needs one."""
    return MASK_BYTES + len(sequence.mask) if sequence.mask is not None else 0


def empty_plan(group: Group) -> StepPlan:
    """The group's next plan, without rows."""
    group.step_id += 1
    nothing = np.empty(0, dtype=np.int64)
    group.pending.append(PendingPlan(group.step_id, nothing.astype(np.intp), nothing, nothing, group.batch.departures))
    return StepPlan(group.epoch, group.step_id)
