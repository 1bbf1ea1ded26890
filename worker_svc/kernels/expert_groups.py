"""Sorts (token, expert) pairs by expert and cuts each expert's into blocks, for the grouped products.

Shapes depend on the number of tokens alone: there is room for the most blocks that any routing makes, and how many
there are stands on the device. So a step is one CUDA graph.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.launch import launch_options, release_next, wait_for_previous

_MOST_ALONE = 4096  # pairs that every program counts itself
_CHUNK_ALONE, _CHUNK = 64, 256  # pairs that a program places then, and where there are more of them
_MOST_CHUNKS = 128
_COMPARISONS = tl.constexpr(8192)  # of the pairs of a chunk with each other, at a time: more don't fit in registers
_MAP = tl.constexpr(64)


@dataclass(frozen=True, slots=True)
class Groups:
    """Pairs by expert. A pair has the index token x top_k + place among the token's experts."""

    pairs: Tensor
    """[P] int32: the pairs of expert 0, then those of 1 ...; what follows the last one is undefined."""
    blocks: Tensor
    """[3, most blocks] int32: expert, index of the first pair in `pairs`, their number; past num_blocks undefined."""
    num_blocks: Tensor
    """[1] int32"""


def most_blocks(pairs: int, num_experts: int, block_pairs: int) -> int:
    """Each expert with pairs has a block of its own, which may be the only one that is not full."""
    used = min(num_experts, pairs)
    return used + (pairs - used) // block_pairs


def group_pairs(experts: Tensor, num_experts: int, block_pairs: int, *, pdl: bool = False) -> Groups:
    """`experts` [T, top_k] int32, negative for a pair that is left out. Pairs keep their order within an expert."""
    count, device = experts.numel(), experts.device
    most = most_blocks(count, num_experts, block_pairs)
    groups = Groups(
        torch.empty(count, dtype=torch.int32, device=device),
        torch.empty(3, most, dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
    )
    alone = count <= _MOST_ALONE
    chunk = _CHUNK_ALONE if alone else max(triton.next_power_of_2(triton.cdiv(count, _MOST_CHUNKS)), _CHUNK)
    chunks, bins = triton.cdiv(count, chunk), max(triton.next_power_of_2(num_experts), 2)
    counts = torch.empty(chunks, bins, dtype=torch.int32, device=device)
    if not alone:
        _count_kernel[(chunks,)](experts, counts, count, EXPERTS=bins, CHUNK=chunk, num_warps=4, **launch_options(pdl))
    _group_kernel[(num_experts + chunks,)](
        experts,
        counts,
        groups.pairs,
        groups.blocks,
        groups.num_blocks,
        count,
        most,
        num_experts,
        EXPERTS=bins,
        CHUNKS=triton.next_power_of_2(chunks),
        PAIRS=max(triton.next_power_of_2(count), _CHUNK_ALONE) if alone else 0,
        BLOCK_PAIRS=block_pairs,
        CHUNK=chunk,
        num_warps=8,
        **launch_options(pdl),
    )
    return groups


@triton.jit(do_not_specialize=["count"])
def _count_kernel(
    experts_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    count: tl.tensor,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Pairs of each expert in a program's chunk."""
    release_next(PDL)
    wait_for_previous(PDL)
    chosen = _chosen(experts_ptr, tl.program_id(0) * CHUNK, count, CHUNK)
    counts = tl.histogram(tl.maximum(chosen, 0), EXPERTS, mask=chosen >= 0)
    tl.store(counts_ptr + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), counts)


@triton.jit(do_not_specialize=["count", "most", "num_experts"])
def _group_kernel(
    experts_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    num_blocks_ptr: tl.tensor,
    count: tl.tensor,
    most: tl.tensor,
    num_experts: tl.tensor,
    EXPERTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per expert for its blocks, then one per chunk of pairs; each knows the counts of all, so that none
    waits for another. PAIRS: of all of them, where each program counts them itself; else 0."""
    release_next(PDL)
    wait_for_previous(PDL)
    own = tl.program_id(0)
    chunk = own - num_experts
    if PAIRS:
        chosen = _chosen(experts_ptr, 0, count, PAIRS)
        index = tl.arange(0, PAIRS)
        counts = tl.histogram(tl.maximum(chosen, 0), EXPERTS, mask=chosen >= 0)
        earlier = tl.histogram(tl.maximum(chosen, 0), EXPERTS, mask=(chosen >= 0) & (index < chunk * CHUNK))
    else:
        index = tl.arange(0, CHUNKS)[:, None]
        at = counts_ptr + index * EXPERTS + tl.arange(0, EXPERTS)[None, :]
        by_chunk = tl.load(at, mask=index * CHUNK < count, other=0)  # [CHUNKS, EXPERTS]
        counts = tl.sum(by_chunk, axis=0)
        earlier = tl.sum(tl.where(index < chunk, by_chunk, 0), axis=0)
    first = tl.cumsum(counts, axis=0) - counts
    if chunk < 0:
        _store_blocks(blocks_ptr, num_blocks_ptr, most, counts, own, first, EXPERTS, BLOCK_PAIRS)
    else:
        _store_pairs(experts_ptr, pairs_ptr, count, chunk * CHUNK, first + earlier, CHUNK)


@triton.jit
def _chosen(experts_ptr: tl.tensor, start: tl.tensor, count: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    """Experts of the pairs from `start` on; -1 past the last."""
    index = start + tl.arange(0, CHUNK)
    return tl.load(experts_ptr + index, mask=index < count, other=-1)


@triton.jit
def _store_pairs(
    experts_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    count: tl.tensor,
    start: tl.tensor,
    first: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """Those from `start` on: a pair's place is `first` [EXPERTS] of its expert, plus those of its chunk before it."""
    index = start + tl.arange(0, CHUNK)
    chosen = _chosen(experts_ptr, start, count, CHUNK)
    place = tl.gather(first, tl.maximum(chosen, 0), axis=0)
    OTHERS: tl.constexpr = CHUNK if CHUNK * CHUNK <= _COMPARISONS else _COMPARISONS // CHUNK
    for offset in range(0, CHUNK, OTHERS):
        other = start + offset + tl.arange(0, OTHERS)
        same = chosen[:, None] == _chosen(experts_ptr, start + offset, count, OTHERS)[None, :]
        place += tl.sum((same & (other[None, :] < index[:, None])).to(tl.int32), axis=1)
    tl.store(pairs_ptr + place, index, mask=chosen >= 0)


@triton.jit
def _store_blocks(
    blocks_ptr: tl.tensor,
    num_blocks_ptr: tl.tensor,
    most: tl.tensor,
    counts: tl.tensor,
    own: tl.tensor,
    first_pairs: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
) -> None:
    """Those of expert `own`. `counts` [EXPERTS]: pairs of all; `first_pairs` [EXPERTS]: where they begin."""
    expert = tl.arange(0, EXPERTS)
    place = tl.sum(tl.where(expert == own, first_pairs, 0), axis=0)
    blocks = (counts + BLOCK_PAIRS - 1) // BLOCK_PAIRS
    pairs_left = tl.sum(tl.where(expert == own, counts, 0), axis=0)
    block = tl.sum(tl.where(expert < own, blocks, 0), axis=0)
    if own == 0:
        tl.store(num_blocks_ptr, tl.sum(blocks, axis=0))
    for offset in range(0, pairs_left, _MAP * BLOCK_PAIRS):
        first = offset + tl.arange(0, _MAP) * BLOCK_PAIRS
        at = blocks_ptr + block + first // BLOCK_PAIRS
        tl.store(at, own + tl.zeros_like(first), mask=first < pairs_left)
        tl.store(at + most, place + first, mask=first < pairs_left)
        tl.store(at + 2 * most, tl.minimum(pairs_left - first, BLOCK_PAIRS), mask=first < pairs_left)
