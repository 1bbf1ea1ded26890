"""Turns slots and the batch state on the device into the inputs of a decode step; takes sampled tokens back.

Reference: runner.batch.BatchState.

A padding row has slot -1: its token has id 0, position 0 and slot mapping -1, and it attends to nothing.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.launch import launch_options, release_next, row_stride, wait_for_previous

BLOCK = 128


@dataclass(frozen=True, slots=True)
class SlotState:
    """What each of S slots holds; tensors on the device."""

    lengths: Tensor
    """[S] int32: known tokens and those sampled; also the position of the next sampled token."""
    last_tokens: Tensor
    """[S] int32: the token sampled last."""
    block_tables: Tensor
    """[S, blocks] int32"""


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """Of T tokens."""

    token_ids: Tensor
    """[T] int32"""
    positions: Tensor
    """[T] int32"""
    slot_mapping: Tensor
    """[T] int32: block id x block size + offset; -1 stores nothing."""


def prepare_decode(
    slots: Tensor, state: SlotState, block_size: int, *, out: TokenInputs, seq_lens: Tensor, pdl: bool = False
) -> None:
    """One token per row, the last sampled one of its slot. `slots` and `seq_lens` [R] int32; `out` of R tokens.

    The first kernel of a step. With `pdl` the next one starts beside it, but it starts itself when all before has
    ended: so the next one may read what earlier steps wrote, and write where they read, before it waits.
    """
    rows = slots.shape[0]
    _decode_kernel[(triton.cdiv(rows, BLOCK),)](
        slots,
        state.lengths,
        state.last_tokens,
        state.block_tables,
        out.token_ids,
        out.positions,
        out.slot_mapping,
        seq_lens,
        rows,
        row_stride(state.block_tables),
        BLOCK_SIZE=block_size,
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=4,
    )


def append_tokens(slots: Tensor, tokens: Tensor, state: SlotState, *, pdl: bool = False) -> None:
    """last_tokens[slot] = token and lengths[slot] += 1 for each of the [N] rows; no slot appears twice."""
    rows = slots.shape[0]
    _append_kernel[(triton.cdiv(rows, BLOCK),)](
        slots, tokens, state.lengths, state.last_tokens, rows, BLOCK=BLOCK, num_warps=4, **launch_options(pdl)
    )


@triton.jit
def slot_mapping_of(
    tables_ptr: tl.tensor,
    table_stride: tl.tensor,
    slot: tl.tensor,
    position: tl.tensor,
    valid: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    at = tables_ptr + slot.to(tl.int64) * table_stride + position // BLOCK_SIZE
    block = tl.load(at, mask=valid, other=0)
    return tl.where(valid, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)


@triton.jit
def _decode_kernel(
    slots_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    last_tokens_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    rows: tl.tensor,
    table_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    release_next(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    slot = tl.load(slots_ptr + row, mask=inside, other=-1)
    valid = slot >= 0
    length = tl.load(lengths_ptr + slot, mask=valid, other=0)
    position = tl.maximum(length - 1, 0)
    tl.store(token_ids_ptr + row, tl.load(last_tokens_ptr + slot, mask=valid, other=0), mask=inside)
    tl.store(positions_ptr + row, position, mask=inside)
    mapping = slot_mapping_of(tables_ptr, table_stride, slot, position, valid, BLOCK_SIZE)
    tl.store(slot_mapping_ptr + row, mapping, mask=inside)
    tl.store(seq_lens_ptr + row, length, mask=inside)


@triton.jit
def _append_kernel(
    slots_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    last_tokens_ptr: tl.tensor,
    rows: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    release_next(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    slot = tl.load(slots_ptr + row, mask=row < rows, other=-1)
    valid = slot >= 0
    tl.store(last_tokens_ptr + slot, tl.load(tokens_ptr + row, mask=valid, other=0), mask=valid)
    length = tl.load(lengths_ptr + slot, mask=valid, other=0)
    tl.store(lengths_ptr + slot, length + 1, mask=valid)
