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

_LEAST_CHUNK, _MOST_CHUNK = 256, 4096  # pairs that a program looks at in one go
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
    _group_kernel[(num_experts,)](
        experts,
        groups.pairs,
        groups.blocks,
        groups.num_blocks,
        count,
        most,
        EXPERTS=max(triton.next_power_of_2(num_experts), 2),
        BLOCK_PAIRS=block_pairs,
        CHUNK=min(max(triton.next_power_of_2(count), _LEAST_CHUNK), _MOST_CHUNK),
        num_warps=8,
        **launch_options(pdl),
    )
    return groups


@triton.jit
def _group_kernel(
    experts_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    num_blocks_ptr: tl.tensor,
    count: tl.tensor,
    most: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per expert; each counts the pairs of all, so that none waits for another."""
    release_next(PDL)
    own = tl.program_id(0)
    expert, index = tl.arange(0, EXPERTS), tl.arange(0, CHUNK)
    wait_for_previous(PDL)
    counts = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, count, CHUNK):
        chosen = tl.load(experts_ptr + start + index, mask=start + index < count, other=-1)
        counts += tl.histogram(tl.maximum(chosen, 0), EXPERTS, mask=chosen >= 0)
    blocks = (counts + BLOCK_PAIRS - 1) // BLOCK_PAIRS
    place = tl.sum(tl.where(expert < own, counts, 0), axis=0)
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
    for start in range(0, count, CHUNK):
        chosen = tl.load(experts_ptr + start + index, mask=start + index < count, other=-1)
        mine = (chosen == own).to(tl.int32)
        tl.store(pairs_ptr + place + tl.cumsum(mine, axis=0) - 1, start + index, mask=mine == 1)
        place += tl.sum(mine, axis=0)
