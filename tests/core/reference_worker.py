"""A worker that is obviously right: folds plans slot by slot, with symbolic K/V. Knows nothing of the scheduler.

K/V is two layers deep. Layer 0 of a block's offset holds the token; layer 1 holds what layer-0 attention read through
the block table: all tokens up to that position. A row is sound iff every layer-1 entry that it reads is exactly the
prefix of its own tokens. The sampled token is a pure function of (seed, tokens), so every request has an oracle.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shared.logprobs import entry_bytes
from shared.types import Admission, RowSampling, StepPlan, StepResult

NUM_SAMPLED = 6
"""Tokens below are sampled, 0 being the end-of-sequence token; further ones appear in prompts alone."""
POISON = 7
"""Where this token is, the model's K/V is NaN."""
VOCABULARY_SIZE = 8

Tokens = tuple[int, ...]
Cell = Tokens | str
"""Layer 1 of an offset: a prefix, or what else memory can hold."""
NAN, JUNK, ZERO = "nan", "junk", "zero"


class Unsound(Exception):
    """The plan made a row read what is not its own prefix, or is no plan."""


def allowed_tokens(tokens: Tokens) -> bytes:
    """The grammar of constrained requests: forbids one token, depending on all before it. As in TokenMask.allowed."""
    return bytes([0xFF & ~(1 << hash((-3, *tokens)) % NUM_SAMPLED)])


def next_token(tokens: Tokens, num_output: int, sampling: RowSampling, mask: bytes | None) -> int:
    """Forward and sampling: the token after `tokens`, of which the last `num_output` are output."""
    suppressed = sampling.suppressed_ids if num_output < sampling.min_tokens else ()
    token = hash((sampling.seed, *tokens)) % NUM_SAMPLED
    while token in suppressed or (mask is not None and not mask[0] >> token & 1):
        token = (token + 1) % NUM_SAMPLED
    return token


def logprobs_entry(tokens: Tokens, num_top: int | None) -> bytes:
    """What is told of the last of the tokens."""
    size = entry_bytes(num_top)
    return hashlib.shake_128(repr(tokens).encode()).digest(size)


@dataclass
class Slot:
    """One sequence as the log tells it."""

    admission: Admission
    table: list[int]
    computed: int
    sample_at: int
    prompt_length: int
    sampling: RowSampling
    last: int | None = None


@dataclass
class Row:
    """What one row computes."""

    slot: int
    tokens: list[int]
    start: int

    @property
    def positions(self) -> range:
        """Of its tokens in their sequence."""
        return range(self.start, self.start + len(self.tokens))


class ReferenceWorker:
    """K/V memory and, from the first plan of an epoch on, the fold of its plans."""

    def __init__(self, num_blocks: int, block_size: int, num_slots: int) -> None:
        self.block_size = block_size
        self.num_slots = num_slots
        self.tokens = [[-1] * block_size for _ in range(num_blocks)]
        self.contexts: list[list[Cell]] = [[JUNK] * block_size for _ in range(num_blocks)]
        self.restart_log()

    def restart_log(self) -> None:
        """Drops batch state, not K/V memory: a new epoch opens."""
        self.slots: dict[int, Slot] = {}
        self.step_id = 0

    def execute(self, plan: StepPlan, broken_row: int | None = None, split: Iterable[int] | None = None) -> StepResult:
        """Folds and computes a plan.

        `broken_row`: index of a row whose K/V becomes NaN by a fault of the machine.
        `split`: executes the rows one after the other in this order, each with all its layers.
        """
        self._fold(plan)
        rows = self._rows(plan)
        masks = {mask.slot: mask.allowed for mask in plan.masks}
        parts = [rows] if split is None else [[rows[index]] for index in split]
        sampled: dict[int, int | None] = {}
        for part in parts:
            broken = rows[broken_row].slot if broken_row is not None and broken_row < len(rows) else None
            self._forward(part, masks, sampled, broken)
        in_order = [sampled[row.slot] for row in rows if row.slot in sampled]
        logprobs = b"".join(self._logprobs(row, sampled[row.slot]) for row in rows if row.slot in sampled)
        return StepResult(
            plan.epoch,
            plan.step_id,
            np.array([token or 0 for token in in_order], dtype=np.int32),
            np.array([index for index, token in enumerate(in_order) if token is None], dtype=np.int32),
            logprobs=logprobs,
            prompt_logprobs=b"".join(map(self._prompt_logprobs, rows)),
        )

    def _logprobs(self, row: Row, token: int | None) -> bytes:
        return logprobs_entry((*self._read_tokens(row), token or 0), self.slots[row.slot].sampling.logprobs)

    def _prompt_logprobs(self, row: Row) -> bytes:
        state, own = self.slots[row.slot], self._read_tokens(row)
        admission, num_top = state.admission, state.sampling.prompt_logprobs
        begin = max(row.start, admission.prompt_logprobs_from)
        end = min(row.positions.stop, state.prompt_length)
        if num_top is None or begin >= end:
            return b""
        if begin <= admission.cached_length:
            raise Unsound(f"the row before position {begin} was not computed")
        return b"".join(logprobs_entry(own[: position + 1], num_top) for position in range(begin, end))

    def _fold(self, plan: StepPlan) -> None:
        self.step_id += 1
        if plan.step_id != self.step_id:
            raise Unsound(f"step {plan.step_id} after {self.step_id - 1}")
        for admission in plan.admitted:
            if not 0 <= admission.slot < self.num_slots:
                raise Unsound(f"no slot {admission.slot}")
            if len(admission.cached_ids) != admission.cached_length * admission.sampling.rules.looks_back:
                raise Unsound(f"{len(admission.cached_ids)} ids told of {admission.cached_length}")
            self.slots[admission.slot] = Slot(
                admission=admission,
                table=admission.block_ids.tolist(),
                computed=admission.cached_length,
                sample_at=admission.known_length,
                prompt_length=admission.prompt_length,
                sampling=admission.sampling,
            )
        for slot, block in plan.grown.tolist():
            self.slots[slot].table.append(block)
        for block in plan.zeroed.tolist():
            self.contexts[block] = [ZERO] * self.block_size

    def _rows(self, plan: StepPlan) -> list[Row]:
        rows: list[Row] = []
        ids = plan.token_ids.tolist()
        for slot, count, known in plan.rows.tolist():
            state = self.slots[slot]
            tokens, ids = ids[:known], ids[known:]
            if known == 0 and count == 1 and state.last is not None:
                tokens = [state.last]
            if len(tokens) != count or not count:
                raise Unsound(f"row of {count} tokens, {known} known, last {state.last}")
            rows.append(Row(slot, tokens, state.computed))
            state.computed += count
        if ids or len({row.slot for row in rows}) != len(rows):
            raise Unsound("tokens left over, or two rows of a slot")
        return rows

    def _forward(
        self, rows: list[Row], masks: dict[int, bytes], sampled: dict[int, int | None], broken: int | None
    ) -> None:
        self._store_tokens(rows)
        hidden = {row.slot: self._read_tokens(row) for row in rows}
        for row in rows:
            self._store_contexts(row, hidden[row.slot], row.slot == broken)
        for row in rows:
            is_finite = self._attend(row, hidden[row.slot])
            state = self.slots[row.slot]
            if state.computed == state.sample_at:
                own = hidden[row.slot]
                mask = masks.pop(row.slot, None)
                token = next_token(own, len(own) - state.prompt_length, state.sampling, mask)
                state.last = sampled[row.slot] = token if is_finite else None
                state.last = state.last or 0
                state.sample_at += 1

    def _store_tokens(self, rows: list[Row]) -> None:
        written: set[tuple[int, int]] = set()
        for row in rows:
            for position, token in zip(row.positions, row.tokens, strict=True):
                block, offset = at = self._at(row.slot, position)
                if at in written:
                    raise Unsound(f"two rows write block {block} offset {offset}")
                written.add(at)
                self.tokens[block][offset] = token

    def _read_tokens(self, row: Row) -> Tokens:
        places = [self._at(row.slot, position) for position in range(row.positions.stop)]
        return tuple(self.tokens[block][offset] for block, offset in places)

    def _store_contexts(self, row: Row, own: Tokens, broken: bool) -> None:
        for position in row.positions:
            before = (self._at(row.slot, earlier) for earlier in range(position))
            is_nan = broken or own[position] == POISON or any(self.contexts[b][o] == NAN for b, o in before)
            block, offset = self._at(row.slot, position)
            self.contexts[block][offset] = NAN if is_nan else own[: position + 1]

    def _attend(self, row: Row, own: Tokens) -> bool:
        """Checks all that the row's last token reads; whether it is finite."""
        is_finite = True
        end = row.positions.stop
        table, told = self.slots[row.slot].table, self.slots[row.slot].admission.cached_ids.tolist()
        if tuple(told) != own[: len(told)]:
            raise Unsound(f"slot {row.slot} was told {told} of {own}")
        for position in range(end):
            block, offset = table[position // self.block_size], position % self.block_size
            context = self.contexts[block][offset]
            if context == NAN:
                is_finite = False
            elif context != own[: position + 1]:
                raise Unsound(f"slot {row.slot} position {position}: block {block} holds {context}, not {own}")
        return is_finite

    def _at(self, slot: int, position: int) -> tuple[int, int]:
        table = self.slots[slot].table
        if position >= len(table) * self.block_size:
            raise Unsound(f"slot {slot} has no block for position {position}")
        return table[position // self.block_size], position % self.block_size
