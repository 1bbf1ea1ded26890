"""What one step needs, as plain values: the fold of plans makes it, the layers consume it. Numpy only."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shared.types import IntArray, TokenMask

Bools: TypeAlias = NDArray[np.bool_]
LongArray: TypeAlias = NDArray[np.int64]

GREEDY_BELOW = 1e-5
"""Lower temperatures take the most likely token: dividing by them would overflow float32 logits."""

ROWS_AT_A_TIME = 64
"""Most rows whose logits torch works on at a time. It needs many times their memory: for 1,024 rows of Qwen3's
vocabulary that would be gigabytes, which K/V lacks."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """The R rows of one step as the fold leaves them: little more than what changed."""

    slots: LongArray
    """[R]"""
    counts: LongArray
    """[R]: tokens of each row."""
    starts: LongArray
    """[R]: position of each row's first token."""
    known: LongArray
    """[R]: how many of a row's tokens the plan told: all, or none of one."""
    samples: Bools
    """[R]: rows that reach their sequence's last token."""
    token_ids: IntArray
    """[sum of known]"""
    grown: IntArray
    """[n, 3]: (slot, column, block id), what the slots' block tables got."""
    zeroed: IntArray
    """Block ids to fill with zeros before anything else."""
    masks: tuple[TokenMask, ...]
    decodes: bool
    """Whether every row is one token, the last sampled one of its slot."""
    repeated: bool
    """Whether the step before had the same rows, all of them decoding; `slots` and `samples` are its very arrays."""

    @property
    def cu_seqlens(self) -> IntArray:
        """[R + 1]: row r has the tokens cu_seqlens[r] to cu_seqlens[r + 1]."""
        bounds = np.zeros(len(self.counts) + 1, dtype=np.int32)
        np.cumsum(self.counts, out=bounds[1:])
        return bounds

    @property
    def all_token_ids(self) -> IntArray:
        """[T]: the step's tokens, -1 where the last sampled one of the slot is taken."""
        token_ids = np.full(int(self.counts.sum()), -1, dtype=np.int32)
        token_ids[np.repeat(self.known > 0, self.counts)] = self.token_ids
        return token_ids


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """The N sampling rows of one step, in row order."""

    slots: LongArray
    """[N]"""
    last_index: LongArray
    """[N]: index of the row's last token among the step's tokens: its hidden state gives the logits."""
    positions: LongArray
    """[N]: absolute position of the token being sampled; part of the noise key."""
    temperature: NDArray[np.float32]
    """[N]; 0 takes the most likely token."""
    top_k: LongArray
    """[N]; 0 keeps all."""
    top_p: NDArray[np.float32]
    """[N]; 1 keeps all."""
    min_p: NDArray[np.float32]
    """[N]; 0 keeps all."""
    seeds: NDArray[np.uint64]
    """[N]"""
    suppressed: IntArray
    """[n, 2]: (row among the N, token id) that may not be sampled."""
    masks: tuple[tuple[int, Bools], ...]
    """(row among the N, allowed tokens [vocabulary size])."""
    ruled: Bools
    """[N]: rows whose sequences have logit rules."""
    logprobs: LongArray
    """[N]: most likely tokens to tell of, -1 where no logprobs were asked for."""

    def select(self, rows: LongArray) -> "SamplingInputs":
        """Some of the rows, ascending."""
        number = {int(row): index for index, row in enumerate(rows)}
        pairs = [(number[row], token) for row, token in self.suppressed.tolist() if row in number]
        columns = ("slots", "last_index", "positions", "temperature", "top_k", "top_p", "min_p", "seeds")
        return SamplingInputs(
            **{name: getattr(self, name)[rows] for name in (*columns, "ruled", "logprobs")},
            suppressed=np.array(pairs, dtype=np.int32).reshape(-1, 2),
            masks=tuple((number[row], allowed) for row, allowed in self.masks if row in number),
        )

    @property
    def greedy(self) -> Bools:
        """[N]: rows that take the most likely token."""
        rows: Bools = self.temperature < GREEDY_BELOW
        return rows

    @property
    def filtered(self) -> Bools:
        """[N]: rows whose choice needs the whole distribution."""
        rows: Bools = ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)) & ~self.greedy
        return rows


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What one forward pass needs. T tokens of R rows (variable-length batch), F of them fed back, N rows sample."""

    token_ids: LongArray
    """[T]; undefined where `feedback_index` points."""
    positions: LongArray
    """[T]"""
    slot_mapping: LongArray
    """[T]: block id x block size + offset, where the token's K/V goes."""
    cu_seqlens: IntArray
    """[R + 1]: row r has the tokens cu_seqlens[r] to cu_seqlens[r + 1]."""
    seq_lens: IntArray
    """[R]: tokens with K/V once the step ran, those that row r attends to."""
    block_size: int
    """Tokens per K/V block."""
    block_tables: IntArray
    """[R, most blocks of a row]; filled up with the row's own first block."""
    feedback_index: LongArray
    """[F]: indices into token_ids that take the last sampled token of `feedback_slots`."""
    feedback_slots: LongArray
    """[F]"""
    sampling: SamplingInputs
    """The N rows that reach their sequence's last token."""
    zeroed: IntArray
    """Block ids to fill with zeros before anything else."""
