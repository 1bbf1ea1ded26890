"""Turns rows of any number of tokens and the batch state on the device into the inputs of a forward pass.

Reference: runner.batch.BatchState. Padding is as in kernels.prepare; a row of padding has slot -1 or no token.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.launch import launch_options, release_next, row_stride, wait_for_previous
from worker_svc.kernels.prepare import BLOCK, SlotState, TokenInputs, slot_mapping_of


@dataclass(frozen=True, slots=True)
class RowInputs:
    """Of R rows with any number of tokens."""

    seq_lens: Tensor
    """[R] int32: tokens with K/V once the step ran."""
    block_tables: Tensor
    """[R, blocks] int32: the rows of the slots' tables."""
    last_index: Tensor
    """[R] int32: the row's last token among the step's."""
    sampling_slots: Tensor
    """[R] int32: the slot of a row that reaches its sequence's end, else -1."""


def prepare_mixed(
    known_ids: Tensor,
    slots: Tensor,
    starts: Tensor,
    cu_seqlens: Tensor,
    state: SlotState,
    block_size: int,
    *,
    out: TokenInputs,
    rows: RowInputs,
    pdl: bool = False,
) -> None:
    """Rows of any number of tokens, padded to a bucket of T tokens and one of R rows.

    known_ids   [T] int32: -1 takes the slot's last sampled token
    slots       [R] int32
    starts      [R] int32: position of the row's first token
    cu_seqlens  [R + 1] int32: row r has the tokens cu_seqlens[r] to cu_seqlens[r + 1]; those from the last on are
                padding, and so are rows without a token
    """
    tokens, num_rows = known_ids.shape[0], slots.shape[0]
    token_programs = triton.cdiv(tokens, BLOCK)
    _mixed_kernel[(token_programs + num_rows,)](
        known_ids,
        slots,
        starts,
        cu_seqlens,
        state.lengths,
        state.last_tokens,
        state.block_tables,
        out.token_ids,
        out.positions,
        out.slot_mapping,
        rows.seq_lens,
        rows.block_tables,
        rows.last_index,
        rows.sampling_slots,
        tokens,
        num_rows,
        token_programs,
        rows.block_tables.shape[1],
        row_stride(state.block_tables),
        row_stride(rows.block_tables),
        SEARCH_STEPS=num_rows.bit_length(),
        BLOCK_SIZE=block_size,
        BLOCK=BLOCK,
        num_warps=4,
        **launch_options(pdl),
    )


@triton.jit
def _mixed_kernel(
    known_ids_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    cu_seqlens_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    last_tokens_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    row_tables_ptr: tl.tensor,
    last_index_ptr: tl.tensor,
    sampling_slots_ptr: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    token_programs: tl.tensor,
    num_blocks: tl.tensor,
    table_stride: tl.tensor,
    row_table_stride: tl.tensor,
    SEARCH_STEPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The first programs do BLOCK tokens each, the others one row each."""
    release_next(PDL)
    program = tl.program_id(0)
    wait_for_previous(PDL)
    if program < token_programs:
        token = program * BLOCK + tl.arange(0, BLOCK)
        inside = token < tokens
        row = _row_of(token, cu_seqlens_ptr, rows, SEARCH_STEPS)
        valid = token < tl.load(cu_seqlens_ptr + rows)
        slot = tl.load(slots_ptr + row, mask=valid, other=0)
        start = tl.load(starts_ptr + row, mask=valid, other=0)
        position = tl.where(valid, start + token - tl.load(cu_seqlens_ptr + row), 0)
        known = tl.load(known_ids_ptr + token, mask=valid, other=0)
        sampled = tl.load(last_tokens_ptr + slot, mask=valid & (known < 0), other=0)
        tl.store(token_ids_ptr + token, tl.where(known < 0, sampled, known), mask=inside)
        tl.store(positions_ptr + token, position, mask=inside)
        mapping = slot_mapping_of(tables_ptr, table_stride, slot, position, valid, BLOCK_SIZE)
        tl.store(slot_mapping_ptr + token, mapping, mask=inside)
    else:
        _prepare_row(
            program - token_programs,
            slots_ptr,
            starts_ptr,
            cu_seqlens_ptr,
            lengths_ptr,
            tables_ptr,
            seq_lens_ptr,
            row_tables_ptr,
            last_index_ptr,
            sampling_slots_ptr,
            num_blocks,
            table_stride,
            row_table_stride,
            BLOCK,
        )


@triton.jit
def _prepare_row(
    row: tl.tensor,
    slots_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    cu_seqlens_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    row_tables_ptr: tl.tensor,
    last_index_ptr: tl.tensor,
    sampling_slots_ptr: tl.tensor,
    num_blocks: tl.tensor,
    table_stride: tl.tensor,
    row_table_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    end = tl.load(cu_seqlens_ptr + row + 1)
    count = end - tl.load(cu_seqlens_ptr + row)
    slot = tl.where(count > 0, tl.load(slots_ptr + row), -1)
    valid = slot >= 0
    seq_len = tl.where(valid, tl.load(starts_ptr + row) + count, 0)
    samples = valid & (seq_len == tl.load(lengths_ptr + slot, mask=valid, other=0))
    tl.store(seq_lens_ptr + row, seq_len)
    tl.store(last_index_ptr + row, tl.maximum(end - 1, 0))
    tl.store(sampling_slots_ptr + row, tl.where(samples, slot, -1))
    known_blocks = tl.where(valid, num_blocks, 0)
    for first in range(0, num_blocks, BLOCK):
        i = first + tl.arange(0, BLOCK)
        inside = i < num_blocks
        blocks = tl.load(tables_ptr + slot.to(tl.int64) * table_stride + i, mask=i < known_blocks, other=0)
        tl.store(row_tables_ptr + row.to(tl.int64) * row_table_stride + i, blocks, mask=inside)


@triton.jit
def _row_of(token: tl.tensor, cu_seqlens_ptr: tl.tensor, rows: tl.tensor, SEARCH_STEPS: tl.constexpr) -> tl.tensor:
    """The last row that starts at or before the token, among rows that have one: a binary search."""
    low = tl.zeros_like(token)
    high = tl.zeros_like(token) + rows  # the row is in [low, high)
    for _ in tl.static_range(SEARCH_STEPS):
        middle = (low + high) // 2
        starts_before = tl.load(cu_seqlens_ptr + middle) <= token
        low = tl.where(starts_before, middle, low)
        high = tl.where(starts_before, high, middle)
    return low
