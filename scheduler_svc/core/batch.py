"""The running sequences of one worker group as arrays indexed by slot. Decides nothing, knows nothing of the pool.

For a slot, with p the prompt's length, o the number of output tokens and s the number of its sampling rows whose
results are not there yet: known = p + o, length = known + s. Its next row starts at `computed`. While known tokens
are to be computed s is 0; from then on computed = length - 1, and a decode row computes one token.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.outputs import KeyArray
from scheduler_svc.core.request import Sequence
from shared.logprobs import entry_bytes
from shared.types import NO_INTS, IntArray, ints

SlotArray: TypeAlias = NDArray[np.intp]

NEVER = np.iinfo(np.int32).max
"""A length that no sequence reaches."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The decode rows of a step. Shared between steps as long as the same slots decode: never written to."""

    slots: SlotArray
    """[num_rows], ascending."""
    generations: NDArray[np.int64]
    """[num_rows]"""
    keys: KeyArray
    """[num_rows]"""
    rows: IntArray
    """[num_rows, 3]: as in StepPlan.rows."""
    mask: IntArray
    """[num_slots]: 1 for the slots that have a row, else 0."""


class Batch:
    """Slots of one group."""

    def __init__(self, config: CoreConfig) -> None:
        slots = config.max_num_seqs
        self._block_size = config.block_size
        self.sequences: list[Sequence | None] = [None] * slots
        self.free_slots = list(reversed(range(slots)))
        # Pages of it that no token reaches are never touched, so it costs what the tokens cost.
        self.tokens = ints(slots, config.max_model_length)
        """[num_slots, max_model_length]: the first `known` of each row."""
        self.keys: KeyArray = np.zeros(slots, dtype=np.int64)
        self.generations: NDArray[np.int64] = np.zeros(slots, dtype=np.int64)
        """How many sequences have left the slot: tells a row's sequence from the slot's next one."""
        self.departures = 0
        """Sum of the generations: while it stands still no row is stale."""
        self.known = np.zeros(slots, dtype=np.int32)
        self.length = np.zeros(slots, dtype=np.int32)
        self.computed = np.zeros(slots, dtype=np.int32)
        self.limit = np.full(slots, NEVER, dtype=np.int32)
        """The length at which a sequence ends."""
        self.capacity = np.zeros(slots, dtype=np.int32)
        """Tokens that the slot's blocks can hold."""
        self.publish_at = np.full(slots, NEVER, dtype=np.int32)
        """Where the first block ends that is not published."""
        self.decoding = np.zeros(slots, dtype=np.bool_)
        """Whether the slot gets a decode row in the next plan, blocks permitting."""
        self.stop_counts = np.zeros(config.vocabulary_size, dtype=np.int32)
        """[vocabulary_size]: how many running sequences end at the token."""
        self.logprob_sizes = np.zeros(slots, dtype=np.int32)
        """Bytes of logprobs that come with each token of a slot."""
        self.num_with_logprobs = 0
        """Running sequences that have any."""
        self._decode_rows: DecodeRows | None = None

    @property
    def num_running(self) -> int:
        """Slots taken."""
        return len(self.sequences) - len(self.free_slots)

    def running(self) -> list[Sequence]:
        """The sequences in slot order."""
        return [sequence for sequence in self.sequences if sequence is not None]

    def at(self, slot: int) -> Sequence:
        """The sequence in a taken slot."""
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} is free"
        return sequence

    def enter(self, sequence: Sequence, tokens: IntArray, cached: int) -> int:
        """Gives the sequence with these known tokens, the first `cached` of them computed, a free slot."""
        slot = self.free_slots.pop()
        known = len(tokens)
        self.sequences[slot] = sequence
        self.tokens[slot, :known] = tokens
        self.keys[slot] = sequence.request.key
        self.known[slot] = self.length[slot] = known
        self.computed[slot] = self.capacity[slot] = cached
        self.limit[slot] = sequence.limit
        self.publish_at[slot] = cached + self._block_size
        self.logprob_sizes[slot] = entry_bytes(sequence.request.logprobs)
        self.num_with_logprobs += sequence.request.logprobs is not None
        for token in sequence.stop_ids:
            self.stop_counts[token] += 1
        return slot

    def leave(self, sequence: Sequence) -> None:
        """Frees the sequence's slot; its known output goes back to it."""
        slot = sequence.slot
        sequence.output = self.tokens[slot, len(sequence.request.prompt) : self.known[slot]].copy()
        for token in sequence.stop_ids:
            self.stop_counts[token] -= 1
        self.num_with_logprobs -= sequence.request.logprobs is not None
        self.set_decoding(slot, False)
        self.limit[slot] = self.publish_at[slot] = NEVER
        self.sequences[slot] = None
        self.free_slots.append(slot)
        self.generations[slot] += 1
        self.departures += 1

    def set_decoding(self, slot: int, decoding: bool) -> None:
        """Whether the slot is to get a decode row."""
        if self.decoding[slot] != decoding:
            self.decoding[slot] = decoding
            self._decode_rows = None

    def decode_rows(self) -> DecodeRows:
        """The rows of all decoding slots."""
        if self._decode_rows is None:
            slots = self.decoding.nonzero()[0]
            rows = np.zeros((len(slots), 3), dtype=np.int32)
            rows[:, 0] = slots
            rows[:, 1] = 1
            self._decode_rows = DecodeRows(
                slots, self.generations[slots], self.keys[slots], rows, self.decoding.astype(np.int32)
            )
        return self._decode_rows

    def logprob_sizes_of(self, slots: SlotArray) -> IntArray:
        """[num_rows]: bytes of logprobs that come with their tokens; empty where none has any."""
        return self.logprob_sizes[slots] if self.num_with_logprobs else NO_INTS

    def lacking_block(self) -> list[int]:
        """Decoding slots whose next token needs a new block."""
        slots: list[int] = ((self.length > self.capacity) & self.decoding).nonzero()[0].tolist()
        return slots

    def advance_decode(self, rows: DecodeRows) -> list[int]:
        """Puts one row of each into the plan; those of which it is the last row."""
        np.add(self.length, rows.mask, out=self.length)
        np.add(self.computed, rows.mask, out=self.computed)
        drained: list[int] = ((self.length == self.limit) & self.decoding).nonzero()[0].tolist()
        return drained

    def is_drained(self, slot: int) -> bool:
        """Whether the sequence's last row is out: nothing is left to plan for it."""
        return bool(self.length[slot] >= self.limit[slot])

    def publishable(self) -> list[int]:
        """Slots with a block whose tokens are all known and whose rows are all in a plan, not published yet."""
        slots: list[int] = (np.minimum(self.known, self.computed) >= self.publish_at).nonzero()[0].tolist()
        return slots
