"""One worker group in one epoch: its batch, its pool, and the plans whose results are not there yet.

Moves single sequences in and out and keeps both sides consistent. Chooses nobody: planner and results do.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.batch import Batch, SlotArray
from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.logprobs import PromptRow
from scheduler_svc.core.outputs import KeyArray
from scheduler_svc.core.prefix import Parent, hash_blocks
from scheduler_svc.core.request import Sequence, State
from shared.types import NO_INTS, IntArray


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The blocks of a group that hold the first tokens of a sequence."""

    blocks: list[int]
    parent: Parent
    """Prefix map entry of the last one."""
    length: int
    """Tokens in them."""


@dataclass(frozen=True, slots=True)
class PendingPlan:
    """A plan without result: whose tokens the result's will be."""

    step_id: int
    slots: SlotArray
    """[num_sampling_rows], in row order."""
    generations: NDArray[np.int64]
    """[num_sampling_rows]: the slots' generations when the rows were planned."""
    keys: KeyArray
    """[num_sampling_rows]"""
    departures: int
    """The batch's departures then."""
    logprob_sizes: IntArray = field(default_factory=lambda: NO_INTS)
    """[num_sampling_rows]: bytes of logprobs that come with each token; empty where none has any."""
    prompt_rows: tuple[PromptRow, ...] = ()
    """Rows that bring logprobs of prompt tokens, in row order."""


class Group:
    """Begins empty with every epoch."""

    def __init__(self, number: int, epoch: int, num_blocks: int, config: CoreConfig) -> None:
        self.number = number
        self.epoch = epoch
        self.pool = BlockPool(num_blocks)
        self.batch = Batch(config)
        self.pending: deque[PendingPlan] = deque()
        self.step_id = 0
        """Of the last plan."""
        self.answered = 0
        """Step id of the last result."""
        self.draining = False
        """The worker is about to leave: nothing new goes there."""
        self.prefilling: dict[int, Sequence] = {}
        """By slot: sequences with known tokens still to be put into a plan."""
        self.masked: dict[int, Sequence] = {}
        """By slot, in order of the masks' arrival: constrained sequences that can decode."""
        self.num_constrained = 0
        """Running sequences that are constrained."""
        self.priorities: Counter[int] = Counter()
        """Running sequences by priority."""
        self.suspects: set[Sequence] = set()
        """Running sequences that were admitted as suspects (see quarantine)."""
        self._config = config

    @property
    def has_joined(self) -> bool:
        """Whether it answered its first plan. Until then another scheduler may hold the worker."""
        return self.answered > 0

    @property
    def is_gathering(self) -> bool:
        """Masks are there, more are to come that fit the same plan, and nothing else would decode: a step for all of
        them costs as much as one for the first."""
        most = min(self.num_constrained, self._config.max_plan_masks)
        return 0 < len(self.masked) < most and not self.batch.decoding.any()

    def find_prefix(self, sequence: Sequence, tokens: IntArray) -> CachedPrefix:
        """What the cache holds of a waiting sequence with these known tokens: never all of them."""
        self._hash(sequence, tokens)
        most = (len(tokens) - 1) // self._config.block_size  # a token is left to compute, into a block of its own
        bound = sequence.most_cached(self._config.max_told_tokens)
        if bound is not None:
            most = min(most, bound // self._config.block_size)
        blocks, parent = self.pool.prefix.match(sequence.hashed[:most], sequence.request.cache_salt)
        return CachedPrefix(blocks, parent, len(blocks) * self._config.block_size)

    def admit(self, sequence: Sequence, tokens: IntArray, cached: CachedPrefix) -> None:
        """The waiting sequence with these known tokens runs here from now on."""
        sequence.move(State.RUNNING)
        self.pool.share(cached.blocks)
        sequence.group = self.number
        sequence.slot = self.batch.enter(sequence, tokens, cached.length)
        sequence.table = list(cached.blocks)
        sequence.published, sequence.parent = len(cached.blocks), cached.parent
        sequence.last_chunk_step = 0
        self.prefilling[sequence.slot] = sequence
        self.num_constrained += sequence.request.constrained
        self.priorities[sequence.request.priority] += 1

    def leave(self, sequence: Sequence, state: State) -> None:
        """The sequence stops running here; its rows in plans without result are stale from now on."""
        sequence.move(state)
        self.publish(sequence)
        self.pool.release(sequence.table)
        self.batch.leave(sequence)
        self.prefilling.pop(sequence.slot, None)
        self.masked.pop(sequence.slot, None)
        self.num_constrained -= sequence.request.constrained
        self.suspects.discard(sequence)
        self.priorities -= Counter((sequence.request.priority,))
        sequence.group = None
        sequence.table = []

    def grow(self, sequence: Sequence, count: int) -> list[int]:
        """Gives the sequence `count` blocks more; the caller made sure that they are free."""
        blocks = self.pool.take(count)
        sequence.table += blocks
        self.batch.capacity[sequence.slot] = len(sequence.table) * self._config.block_size
        return blocks

    def publish(self, sequence: Sequence) -> None:
        """Enters into the prefix map the blocks whose tokens are all known and whose rows are all in a plan.

        The only way into the map, hence also what a sequence does before its blocks are freed.
        """
        batch, slot, size = self.batch, sequence.slot, self._config.block_size
        count = min(batch.known.item(slot), batch.computed.item(slot)) // size
        if count <= sequence.published:
            return
        self._hash(sequence, batch.tokens[slot, : count * size])
        fresh = slice(sequence.published, count)
        sequence.parent = self.pool.prefix.publish(sequence.table[fresh], sequence.hashed[fresh], sequence.parent)
        sequence.published = count
        batch.publish_at[slot] = (count + 1) * size

    def publish_ready(self) -> None:
        """Publishes what the last plan or result completed."""
        for slot in self.batch.publishable():
            self.publish(self.batch.at(slot))

    def in_flight(self, sequence: Sequence) -> bool:
        """Whether a plan without result has a row of the running sequence."""
        slot = sequence.slot
        return sequence.last_chunk_step > self.answered or bool(self.batch.length[slot] > self.batch.known[slot])

    def _hash(self, sequence: Sequence, tokens: IntArray) -> None:
        config = self._config
        hash_blocks(sequence.hashed, tokens, sequence.request.cache_salt, config.block_size, config.hash_seed)
