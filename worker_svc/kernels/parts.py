"""Cuts the contexts of decode rows into parts, one per program and K/V head, and orders them longest first.

The lengths are on the device, so the cut is made there, once per step. What is computed over a part is
kernels.paged_attention's knowledge.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.launch import launch_options, release_next, wait_for_previous

UNIT = 32
"""Parts begin at multiples of so many tokens."""
MAX_SPLITS = 32
"""Most parts of a row."""

FIELDS = tl.constexpr(8)
ROW = tl.constexpr(0)
TABLE_ROW = tl.constexpr(1)
FIRST = tl.constexpr(2)
END = tl.constexpr(3)
FIRST_PART = tl.constexpr(4)
COUNT = tl.constexpr(5)

_FILLING = 512  # programs that fill a GPU
_ROWS = 16  # of a program
_BLOCK = 256  # what a program looks at or clears at a time


@dataclass(frozen=True, slots=True)
class Parts:
    """P parts of R rows, the longest first; on the device."""

    table: Tensor
    """[P, 8] int32: row, its block table, first token and the one after the last, the row's first part, its number of
    parts. The row's parts lie beside each other. A part that is none has row -1."""
    arrived: Tensor
    """[P, num_kv_heads] int32, zeros: how many parts of a row are computed, counted at its first one."""
    num_rows: int
    """R"""


def most_parts(num_rows: int, num_kv_heads: int) -> int:
    """P. Few rows are cut to fill the GPU, in 16 on average at most; of many only those longer than twice the mean."""
    return num_rows + max(num_rows // 2, min(_FILLING // num_kv_heads, 16 * num_rows), 1)


def cut_rows(table_rows: Tensor, lengths: Tensor, num_kv_heads: int, *, pdl: bool = False) -> Parts:
    """`table_rows` [R] int32: the block table of each row, -1 for a row without tokens; `lengths` [any] int32: tokens
    of each table. With `pdl` it reads, and writes what it gives, before it waits: the kernel before must be one that
    starts when all before has ended, as prepare.prepare_decode does, and must not write any of this.

    No part is longer than all contexts together over P - R, but for rounding up to units and to keep to MAX_SPLITS: so
    P parts suffice. A row without tokens has one part. Rows of equal parts keep their order.
    """
    rows = len(table_rows)
    count = most_parts(rows, num_kv_heads)
    table = torch.empty(count, FIELDS.value, dtype=torch.int32, device=lengths.device)
    arrived = torch.empty(count, num_kv_heads, dtype=torch.int32, device=lengths.device)
    _cut_kernel[(triton.cdiv(rows, _ROWS),)](
        table_rows,
        lengths,
        table,
        arrived,
        rows,
        count,
        NUM_KV_HEADS=num_kv_heads,
        UNIT=UNIT,
        MAX_SPLITS=MAX_SPLITS,
        ROWS=_ROWS,
        BLOCK=_BLOCK,
        num_warps=4,
        **launch_options(pdl),
    )
    return Parts(table, arrived, rows)


@triton.jit
def _cut_kernel(
    table_rows_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    rows: tl.tensor,
    most_parts: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Each program places ROWS rows among all: a row's first part is the number of parts of those before it."""
    release_next(PDL)
    longest = _longest_part(table_rows_ptr, lengths_ptr, rows, most_parts, UNIT, MAX_SPLITS, BLOCK)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    length = _length(table_rows_ptr, lengths_ptr, row, rows)
    units, count = _cut(length, longest, UNIT)
    first_part = tl.zeros([ROWS], tl.int32)
    num_parts = 0
    for start in range(0, rows, BLOCK):
        other = start + tl.arange(0, BLOCK)
        other_units, other_count = _cut(_length(table_rows_ptr, lengths_ptr, other, rows), longest, UNIT)
        other_count = tl.where(other < rows, other_count, 0)
        longer = other_units[None, :] > units[:, None]
        before = longer | ((other_units[None, :] == units[:, None]) & (other[None, :] < row[:, None]))
        first_part += tl.sum(tl.where(before, other_count[None, :], 0), axis=1)
        num_parts += tl.sum(other_count, axis=0)
    table_row = tl.load(table_rows_ptr + row, mask=row < rows, other=0)
    i = tl.arange(0, MAX_SPLITS)[None, :]
    exists = (row < rows)[:, None] & (i < count[:, None])
    first = i * units[:, None] * UNIT
    part_ptr = parts_ptr + (first_part[:, None] + i) * FIELDS
    tl.store(part_ptr + ROW, row[:, None] + 0 * i, mask=exists)
    tl.store(part_ptr + TABLE_ROW, table_row[:, None] + 0 * i, mask=exists)
    tl.store(part_ptr + FIRST, first, mask=exists)
    tl.store(part_ptr + END, tl.minimum(first + units[:, None] * UNIT, length[:, None]), mask=exists)
    tl.store(part_ptr + FIRST_PART, first_part[:, None] + 0 * i, mask=exists)
    tl.store(part_ptr + COUNT, count[:, None] + 0 * i, mask=exists)
    for start in range(tl.program_id(0) * BLOCK, most_parts * NUM_KV_HEADS, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(arrived_ptr + at, 0, mask=at < most_parts * NUM_KV_HEADS)
        tl.store(parts_ptr + at * FIELDS + ROW, -1, mask=(at >= num_parts) & (at < most_parts))
    wait_for_previous(PDL)


@triton.jit
def _length(table_rows_ptr: tl.tensor, lengths_ptr: tl.tensor, row: tl.tensor, rows: tl.tensor) -> tl.tensor:
    table_row = tl.load(table_rows_ptr + row, mask=row < rows, other=-1)
    return tl.load(lengths_ptr + table_row, mask=table_row >= 0, other=0)


@triton.jit
def _longest_part(
    table_rows_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    rows: tl.tensor,
    most_parts: tl.tensor,
    UNIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """In units."""
    total = 0
    longest_row = 0
    for start in range(0, rows, BLOCK):
        units = tl.cdiv(_length(table_rows_ptr, lengths_ptr, start + tl.arange(0, BLOCK), rows), UNIT)
        total += tl.sum(units, axis=0)
        longest_row = tl.maximum(longest_row, tl.max(units, axis=0))
    return tl.maximum(tl.maximum(tl.cdiv(total, most_parts - rows), tl.cdiv(longest_row, MAX_SPLITS)), 1)


@triton.jit
def _cut(length: tl.tensor, longest: tl.tensor, UNIT: tl.constexpr) -> tl.tensor:
    """Units of each part of a row but its last, and the number of its parts."""
    units = tl.cdiv(length, UNIT)
    each = tl.maximum(tl.cdiv(units, tl.maximum(tl.cdiv(units, longest), 1)), 1)
    return each, tl.maximum(tl.cdiv(units, each), 1)
