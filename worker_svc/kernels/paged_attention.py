"""Decode attention over paged K/V: one query token per row, long contexts cut into parts for several programs
(flash-decoding, Dao et al. 2023). The query heads of one K/V head fill a tile of 16 rows, so that the products run on
tensor cores.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.launch import (
    check_head_dim,
    dot,
    launch_options,
    prefetch,
    release_next,
    row_stride,
    wait_for_previous,
)
from worker_svc.kernels.parts import COUNT, END, FIELDS, FIRST, FIRST_PART, ROW, TABLE_ROW, UNIT, Parts

_MIN_QUERY_ROWS = 16  # of a tensor core tile
_COMBINED_HEADS = 32  # of all parts, whose outputs are put together at a time: what a warp's registers hold
_FEW_HEADS = 16  # K/V heads of all rows, from which on latency no longer rules
# From so many K/V heads of all rows on; no rule, docs/kernels.md.
_STAGES = ((2048, 4), (512, 5), (64, 4), (_FEW_HEADS, 5), (0, 2))


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    parts: Parts,
    *,
    out: Tensor,
    pdl: bool = False,
) -> None:
    """Attention of R rows, scaled by 1 / sqrt(head_dim).

    query         [R, num_heads x head_dim or more]: the query heads come first; rows may be strided
    key_cache     [num_blocks, block_size, num_kv_heads, head_dim], contiguous; value_cache likewise
    block_tables  [any, blocks] int32; block_size is a multiple of 16
    parts         of the R rows, see parts.cut_rows; a row without a token gives zeros
    out           [R, num_heads x head_dim]

    The tables and parts must be older than the kernel before. Raises StartupError for a head_dim that the kernel
    doesn't have.
    """
    block_size, num_kv_heads, head_dim = key_cache.shape[1:]
    check_head_dim(head_dim)
    assert key_cache.is_contiguous() and value_cache.is_contiguous() and out.is_contiguous()
    num_heads, num_parts = out.shape[1] // head_dim, len(parts.table)
    group = num_heads // num_kv_heads
    query_rows = max(_MIN_QUERY_ROWS, triton.next_power_of_2(group))
    partial = torch.empty(num_parts, num_heads, head_dim, dtype=torch.float32, device=out.device)
    exponents = torch.empty(num_parts, num_heads, dtype=torch.float32, device=out.device)
    _attention_kernel[(num_kv_heads, num_parts)](
        query,
        key_cache,
        value_cache,
        block_tables,
        parts.table,
        parts.arrived,
        out,
        partial,
        exponents,
        row_stride(query),
        row_stride(block_tables),
        math.log2(math.e) / math.sqrt(head_dim),
        BLOCK_SIZE=block_size,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_TILE=triton.next_power_of_2(group),
        QUERY_ROWS=query_rows,
        COMBINED_PARTS=max(_COMBINED_HEADS // triton.next_power_of_2(group), 1),
        HEAD_DIM=head_dim,
        TILE=min(UNIT, block_size & -block_size),
        STAGES=next(stages for heads, stages in _STAGES if parts.num_rows * num_kv_heads >= heads),
        PREFETCH=pdl and parts.num_rows * num_kv_heads < _FEW_HEADS,
        num_warps=query_rows // _MIN_QUERY_ROWS,
        **launch_options(pdl),
    )


@triton.jit
def _attention_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    exponents_ptr: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    COMBINED_PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per K/V head and part: online softmax (Milakov and Gimelshein 2018) in powers of two. Programs start
    in the order of their parts, with the heads of a part beside each other."""
    release_next(PDL)
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    dim = tl.arange(0, HEAD_DIM)
    tile_token = tl.arange(0, TILE)
    member = tl.arange(0, QUERY_ROWS)
    is_head = (member < GROUP)[:, None]
    TOKEN_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    part_ptr = parts_ptr + part * FIELDS
    row = tl.load(part_ptr + ROW).to(tl.int64)
    table_ptr = block_tables_ptr + tl.load(part_ptr + TABLE_ROW).to(tl.int64) * table_stride
    first, end = tl.load(part_ptr + FIRST), tl.load(part_ptr + END)
    first_part, count = tl.load(part_ptr + FIRST_PART), tl.load(part_ptr + COUNT)
    if PREFETCH:  # the first tile is on its way before the queries are there
        tile = tl.where(row >= 0, first, 0) + tile_token
        is_token = (row >= 0) & (tile < end)
        tile_block = tl.load(table_ptr + tile // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
        tile_start = (tile_block * BLOCK_SIZE + tile % BLOCK_SIZE) * TOKEN_STRIDE + kv_head * HEAD_DIM
        line = tl.arange(0, (HEAD_DIM + 63) // 64) * 64  # 128 bytes of bfloat16
        prefetch(key_ptr + tile_start[:, None] + line[None, :])
        prefetch(value_ptr + tile_start[:, None] + line[None, :])
    wait_for_previous(PDL)
    if row < 0:
        return
    head = kv_head * GROUP + member
    query = tl.load(
        query_ptr + row * query_stride + head[:, None] * HEAD_DIM + dim[None, :], mask=is_head, other=0
    )  # [QUERY_ROWS, HEAD_DIM]
    peak = tl.full([QUERY_ROWS], -float("inf"), tl.float32)
    total = tl.zeros([QUERY_ROWS], tl.float32)
    output = tl.zeros([QUERY_ROWS, HEAD_DIM], tl.float32)
    for token in tl.range(first, end, TILE, num_stages=STAGES):
        block = tl.load(table_ptr + token // BLOCK_SIZE).to(tl.int64)
        start = (block * BLOCK_SIZE + token % BLOCK_SIZE) * TOKEN_STRIDE + kv_head * HEAD_DIM
        inside = token + tile_token < end
        key = tl.load(key_ptr + start + tile_token[None, :] * TOKEN_STRIDE + dim[:, None])  # [HEAD_DIM, TILE]
        scores = tl.where(inside[None, :], dot(query, key) * scale, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        p = tl.exp2(scores - new_peak[:, None])
        correction = tl.exp2(peak - new_peak)
        total = total * correction + tl.sum(p, axis=1)
        # Beyond the row's end lies what a block's last owner left; even times zero a NaN would be one.
        value_at = value_ptr + start + tile_token[:, None] * TOKEN_STRIDE + dim[None, :]
        value = tl.load(value_at, mask=inside[:, None], other=0)  # [TILE, HEAD_DIM]
        output = output * correction[:, None] + dot(p.to(value.dtype), value)
        peak = new_peak
    output = output / tl.where(total > 0, total, 1)[:, None]
    if count == 1:
        out_at = out_ptr + row * (NUM_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out_at, output.to(out_ptr.dtype.element_ty), mask=is_head)
    else:
        part_head = part * NUM_HEADS + head
        tl.store(partial_ptr + part_head[:, None] * HEAD_DIM + dim[None, :], output, mask=is_head)
        tl.store(exponents_ptr + part_head, peak + tl.log2(total), mask=member < GROUP)
        arrived_at = arrived_ptr + first_part * NUM_KV_HEADS + kv_head
        tl.debug_barrier()  # so that the arrival of one thread publishes the stores of all
        if tl.atomic_add(arrived_at, 1, sem="acq_rel") == count - 1:
            tl.store(arrived_at, 0)  # for the next layer
            group = tl.arange(0, GROUP_TILE)
            first_head = first_part * NUM_HEADS + kv_head * GROUP
            combined = _combined(
                partial_ptr,
                exponents_ptr,
                first_head,
                count,
                group,
                NUM_HEADS,
                GROUP,
                HEAD_DIM,
                COMBINED_PARTS,
            )
            out_head = row * NUM_HEADS + kv_head * GROUP + group
            out_at = out_ptr + out_head[:, None] * HEAD_DIM + dim[None, :]
            tl.store(out_at, combined.to(out_ptr.dtype.element_ty), mask=(group < GROUP)[:, None])


@triton.jit
def _combined(
    partial_ptr: tl.tensor,
    exponents_ptr: tl.tensor,
    first_head: tl.tensor,
    count: tl.tensor,
    group: tl.tensor,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> tl.tensor:
    """[GROUP_TILE, HEAD_DIM]: the outputs of a row's parts, weighted by their sums of exponentials. Other programs
    wrote them, so they are read past the first level cache."""
    dim = tl.arange(0, HEAD_DIM)
    peak = tl.full([group.shape[0]], -float("inf"), tl.float32)
    total = tl.zeros([group.shape[0]], tl.float32)
    output = tl.zeros([group.shape[0], HEAD_DIM], tl.float32)
    for start in range(0, count, AT_ONCE):
        i = start + tl.arange(0, AT_ONCE)
        exists = (i < count)[:, None] & (group < GROUP)[None, :]
        at = first_head + i[:, None] * NUM_HEADS + group[None, :]  # [AT_ONCE, group]
        exponent = tl.load(exponents_ptr + at, mask=exists, other=-float("inf"), cache_modifier=".cg")
        partial_at = partial_ptr + at[:, :, None] * HEAD_DIM + dim[None, None, :]
        partial = tl.load(partial_at, mask=exists[:, :, None], other=0, cache_modifier=".cg")
        new_peak = tl.maximum(peak, tl.max(exponent, axis=0))
        weight = tl.exp2(exponent - new_peak[None, :])
        correction = tl.exp2(peak - new_peak)
        total = total * correction + tl.sum(weight, axis=0)
        output = output * correction[:, None] + tl.sum(weight[:, :, None] * partial, axis=0)
        peak = new_peak
    return output / total[:, None]
