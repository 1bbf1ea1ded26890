"""Decode attention over paged K/V: one query token per row, the context split over programs (flash-decoding, Dao et al.
2023). The query heads of one K/V head fill a tile of 16 rows, so that the products run on tensor cores.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.launch import check_head_dim, dot, launch_options, release_next, row_stride, wait_for_previous

_MIN_QUERY_ROWS = 16  # of a tensor core tile
_TILE = 32  # tokens of K/V at a time; fewer where blocks need it
_MANY_HEADS = 2048  # K/V heads of all rows that fill the GPU several times over
_SPLITS = ((1024, 1), (64, 4), (0, 16))  # from so many K/V heads of all rows on, so many splits


def num_splits(num_rows: int, num_kv_heads: int) -> int:
    """How many programs share one row's context. Rows too short for so many use fewer.

    More than it takes to fill the GPU: rows differ in length, and a long one must not run on when the others are done.
    One row of 32,000 tokens among 63 of 400 takes 912 us on an H200 with one split and 145 us with eight.
    """
    return next(splits for heads, splits in _SPLITS if num_rows * num_kv_heads >= heads)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    table_rows: Tensor,
    seq_lens: Tensor,
    *,
    out: Tensor,
    splits: int,
    pdl: bool = False,
) -> None:
    """Attention of R rows, scaled by 1 / sqrt(head_dim).

    query         [R, num_heads x head_dim or more]: the query heads come first; rows may be strided
    key_cache     [num_blocks, block_size, num_kv_heads, head_dim], contiguous; value_cache likewise
    block_tables  [any, blocks] int32; row r uses block_tables[table_rows[r]]; block_size is a multiple of 16
    seq_lens      [R] int32: tokens that a row attends to, its own included; a row of 0 gives zeros
    out           [R, num_heads x head_dim]

    `splits` is a power of two, see num_splits. The tables and seq_lens must be older than the kernel before. Raises
    StartupError for a head_dim that the kernels don't have.
    """
    rows = seq_lens.shape[0]
    block_size, num_kv_heads, head_dim = key_cache.shape[1:]
    check_head_dim(head_dim)
    assert key_cache.is_contiguous() and value_cache.is_contiguous() and out.is_contiguous()
    num_heads = out.shape[1] // head_dim
    tile = min(_TILE, block_size & -block_size)
    # Where rows fill the GPU, more programs at a time hide the memory's latency; else more loads of each do.
    warps, stages = (1, 4) if rows * num_kv_heads >= _MANY_HEADS else (2, 5)
    query_rows = max(_MIN_QUERY_ROWS, triton.next_power_of_2(num_heads // num_kv_heads))
    partial, weights = out, out
    if splits > 1:
        partial = torch.empty(rows, num_heads, splits, head_dim, dtype=torch.float32, device=out.device)
        weights = torch.empty(rows, num_heads, splits, dtype=torch.float32, device=out.device)
    _attention_kernel[(rows, num_kv_heads, splits)](
        query,
        key_cache,
        value_cache,
        block_tables,
        table_rows,
        seq_lens,
        out,
        partial,
        weights,
        row_stride(query),
        row_stride(block_tables),
        math.log2(math.e) / math.sqrt(head_dim),
        BLOCK_SIZE=block_size,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        QUERY_ROWS=query_rows,
        HEAD_DIM=head_dim,
        TILE=tile,
        SPLITS=splits,
        STAGES=stages,
        num_warps=warps * query_rows // _MIN_QUERY_ROWS,
        **launch_options(pdl),
    )
    if splits > 1:
        _combine_kernel[(rows, num_heads)](
            partial,
            weights,
            seq_lens,
            out,
            HEAD_DIM=head_dim,
            TILE=tile,
            SPLITS=splits,
            num_warps=2,
            **launch_options(pdl),
        )


@triton.jit
def _tiles_per_split(seq_len: tl.tensor, TILE: tl.constexpr, SPLITS: tl.constexpr) -> tl.tensor:
    return tl.cdiv(tl.cdiv(seq_len, TILE), SPLITS)


@triton.jit
def _attention_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    table_rows_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per row, K/V head and split: online softmax (Milakov and Gimelshein 2018) in powers of two."""
    release_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    dim = tl.arange(0, HEAD_DIM)
    tile_token = tl.arange(0, TILE)
    member = tl.arange(0, QUERY_ROWS)
    is_head = (member < GROUP)[:, None]
    TOKEN_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    seq_len = tl.load(seq_lens_ptr + row)
    table_ptr = block_tables_ptr + tl.load(table_rows_ptr + row).to(tl.int64) * table_stride
    per_split = _tiles_per_split(seq_len, TILE, SPLITS)
    first_tile = split * per_split
    end_tile = tl.minimum(first_tile + per_split, tl.cdiv(seq_len, TILE))
    wait_for_previous(PDL)
    if SPLITS > 1:  # with one split a row of length 0 must still write its zeros
        if first_tile >= end_tile:
            return
    head = kv_head * GROUP + member
    query = tl.load(
        query_ptr + row * query_stride + head[:, None] * HEAD_DIM + dim[None, :], mask=is_head, other=0
    )  # [QUERY_ROWS, HEAD_DIM]
    peak = tl.full([QUERY_ROWS], -float("inf"), tl.float32)
    total = tl.zeros([QUERY_ROWS], tl.float32)
    output = tl.zeros([QUERY_ROWS, HEAD_DIM], tl.float32)
    for tile in tl.range(first_tile, end_tile, num_stages=STAGES):
        token = tile * TILE
        block = tl.load(table_ptr + token // BLOCK_SIZE).to(tl.int64)
        start = (block * BLOCK_SIZE + token % BLOCK_SIZE) * TOKEN_STRIDE + kv_head * HEAD_DIM
        inside = token + tile_token < seq_len
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
    head_row = row * (NUM_KV_HEADS * GROUP) + head
    if SPLITS == 1:
        out_at = out_ptr + head_row[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out_at, output.to(out_ptr.dtype.element_ty), mask=is_head)
    else:
        part = head_row * SPLITS + split
        tl.store(partial_ptr + part[:, None] * HEAD_DIM + dim[None, :], output, mask=is_head)
        tl.store(weights_ptr + part, peak + tl.log2(total), mask=member < GROUP)


@triton.jit
def _combine_kernel(
    partial_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per row and query head: the splits' outputs, weighted by their sums of exponentials."""
    release_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    head_row = row * tl.num_programs(1) + tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + row)
    per_split = tl.maximum(_tiles_per_split(seq_len, TILE, SPLITS), 1)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, HEAD_DIM)
    used = split * per_split < tl.cdiv(seq_len, TILE)
    wait_for_previous(PDL)
    part = head_row * SPLITS + split
    exponent = tl.load(weights_ptr + part, mask=used, other=-float("inf"))
    partial = tl.load(partial_ptr + part[:, None] * HEAD_DIM + dim[None, :], mask=used[:, None], other=0)
    weight = tl.where(used, tl.exp2(exponent - tl.max(exponent, axis=0)), 0)
    output = tl.sum(weight[:, None] * partial, axis=0) / tl.where(seq_len > 0, tl.sum(weight, axis=0), 1)
    tl.store(out_ptr + head_row * HEAD_DIM + dim, output.to(out_ptr.dtype.element_ty))
