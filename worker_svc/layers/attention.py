"""Attention over paged K/V behind one small interface, and its torch reference for CPUs.

A backend prepares once per step what all layers share; each layer then stores K/V of all rows before any row attends,
so that rows may share blocks (the row that writes comes first in the batch).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from worker_svc.layers.kv_cache import LayerCache
from worker_svc.step_inputs import LongArray, StepInputs

_GATHER_LIMIT = 1 << 16  # tokens of K/V copied at a time: bounds the memory of a batch with long contexts


class StepAttention(Protocol):
    """Attention of one step, the same for all layers but for the K/V memory."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache) -> Tensor:
        """Stores `key` and `value`, [T, num_kv_heads, head_dim], where the slot mapping says; tokens with slot -1 are
        not stored. Then attends with `query`, [T, num_heads, head_dim], causally over each row's blocks, scaled by
        1 / sqrt(head_dim). Returns [T, num_heads, head_dim]."""


class AttentionBackend(Protocol):
    """One way to compute attention."""

    name: str

    def prepare(self, inputs: StepInputs) -> StepAttention:
        """Called once per step."""


class TorchAttention:
    """torch's scaled_dot_product_attention: decode rows in padded batches, other rows one by one."""

    name = "torch"

    def prepare(self, inputs: StepInputs) -> "TorchStep":
        """Groups the rows and builds their masks."""
        counts = np.diff(inputs.cu_seqlens)
        decode = np.flatnonzero(counts == 1)
        groups = [_padded_rows(inputs, rows) for rows in _decode_groups(decode, inputs.seq_lens)]
        groups += [_single_row(inputs, int(row)) for row in np.flatnonzero(counts > 1)]
        stored = np.flatnonzero(inputs.slot_mapping >= 0)
        return TorchStep(
            groups=groups,
            stored=None if len(stored) == len(inputs.slot_mapping) else torch.from_numpy(stored),
            slots=torch.from_numpy(inputs.slot_mapping[stored]),
        )


@dataclass(frozen=True, slots=True)
class _Group:
    """R rows of Q tokens each that attend together over L tokens of K/V."""

    tokens: Tensor
    """[R x Q]: indices among the step's tokens, row by row."""
    blocks: Tensor
    """[R, B]"""
    length: int
    """L, at most B x block size."""
    mask: Tensor
    """[R, 1, Q, L]: which tokens each query sees."""
    unseen: Tensor | None
    """[R, 1, L, 1]: which of them no query of the row sees; None: there are none. What memory holds there is left of
    whoever had the block before, and a masked NaN would still poison a weighted sum."""


@dataclass(frozen=True, slots=True)
class TorchStep:
    """Attention of one step."""

    groups: list[_Group]
    stored: Tensor | None
    """Tokens whose K/V is kept; None: all."""
    slots: Tensor

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache) -> Tensor:
        """See StepAttention."""
        self._store(key, cache.key)
        self._store(value, cache.value)
        output = torch.zeros_like(query)
        for group in self.groups:
            output.index_copy_(0, group.tokens, _attend(query.index_select(0, group.tokens), cache, group))
        return output

    def _store(self, new: Tensor, cache: Tensor) -> None:
        kept = new if self.stored is None else new.index_select(0, self.stored)
        cache.flatten(0, 1).index_copy_(0, self.slots, kept)


def _attend(query: Tensor, cache: LayerCache, group: _Group) -> Tensor:
    """[R x Q, num_heads, head_dim] to the same. The query heads of one K/V head, which lie beside each other, count as
    further queries of it: so K and V are read where they are."""
    rows, length = len(group.blocks), group.length
    queries, heads, dim = len(query) // rows, *query.shape[1:]
    kv_heads = cache.key.shape[2]
    shared = heads // kv_heads
    q = query.view(rows, queries, kv_heads, shared, dim).permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, dim)
    k, v = (_gather(memory, group.blocks)[:, :length].transpose(1, 2) for memory in (cache.key, cache.value))
    if group.unseen is not None:
        k, v = k.masked_fill(group.unseen, 0.0), v.masked_fill(group.unseen, 0.0)
    mask = group.mask.repeat(1, 1, shared, 1)
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.view(rows, kv_heads, shared, queries, dim).permute(0, 3, 1, 2, 4).reshape(-1, heads, dim)


def _gather(memory: Tensor, blocks: Tensor) -> Tensor:
    """[R, B x block size, num_kv_heads, head_dim]: the rows' K or V."""
    return memory.index_select(0, blocks.flatten()).view(len(blocks), -1, *memory.shape[2:])


def _decode_groups(rows: LongArray, seq_lens: NDArray[np.int32]) -> Iterator[LongArray]:
    """Rows of similar length together, each group within the gather limit once padded to its longest."""
    rows = rows[np.argsort(-seq_lens[rows], kind="stable")]
    while len(rows):
        size = max(1, _GATHER_LIMIT // int(seq_lens[rows[0]]))
        yield rows[:size]
        rows = rows[size:]


def _padded_rows(inputs: StepInputs, rows: LongArray) -> _Group:
    seq_lens = inputs.seq_lens[rows]
    length = int(seq_lens.max())
    mask = np.arange(length) < seq_lens[:, None]
    return _Group(
        tokens=torch.from_numpy(inputs.cu_seqlens[rows].astype(np.int64)),
        blocks=_blocks(inputs, rows, length),
        length=length,
        mask=torch.from_numpy(mask[:, None, None]),
        unseen=None if mask.all() else torch.from_numpy(~mask[:, None, :, None]),
    )


def _single_row(inputs: StepInputs, row: int) -> _Group:
    start, end = (int(bound) for bound in inputs.cu_seqlens[row : row + 2])
    length = int(inputs.seq_lens[row])
    mask = np.arange(length) <= np.arange(length - (end - start), length)[:, None]
    return _Group(
        tokens=torch.arange(start, end),
        blocks=_blocks(inputs, np.array([row]), length),
        length=length,
        mask=torch.from_numpy(mask[None, None]),
        unseen=None,
    )


def _blocks(inputs: StepInputs, rows: LongArray, length: int) -> Tensor:
    width = -(-length // inputs.block_size)
    return torch.from_numpy(inputs.block_tables[rows, :width].astype(np.int64))
