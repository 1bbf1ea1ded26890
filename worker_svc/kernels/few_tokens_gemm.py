"""Products of at most 16 tokens with the weights of their experts: every program finds its pairs in the router's
choice, so that they need not be grouped. A token has its own row of the block, whether the expert is one of its own or
not: the tensor cores' tiles are no smaller.
"""

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.expert_products import Tile, block_products, tiles_of
from worker_svc.kernels.launch import launch_options, release_next, row_stride, wait_for_previous
from worker_svc.kernels.routing import Routed

MOST_TOKENS = 16


def gated_products_of_few(x: Tensor, weight: Tensor, routed: Routed, tile: Tile, *, pdl: bool = False) -> Tensor:
    """silu(gate) * up of each pair's expert and token, [T, top_k, width]; pairs of no expert are left undefined.

    `x` [T, hidden], `weight` [experts, 2 x width, hidden], the rows of gate first; T is at most MOST_TOKENS.
    """
    out = x.new_empty(*routed.experts.shape, weight.shape[1] // 2)
    _launch(x, weight, routed, out, tile, True, pdl)
    return out


def weighted_products_of_few(x: Tensor, weight: Tensor, routed: Routed, tile: Tile, *, pdl: bool = False) -> Tensor:
    """Probability x product of each pair, [T, top_k, hidden]; pairs of no expert are left undefined.

    `x` [T, top_k, width], `weight` [experts, hidden, width]. The kernel before must be that of gated_products_of_few.
    """
    out = x.new_empty(*routed.experts.shape, weight.shape[1])
    _launch(x.flatten(0, 1), weight, routed, out, tile, False, pdl)
    return out


def _launch(x: Tensor, weight: Tensor, routed: Routed, out: Tensor, tile: Tile, gated: bool, pdl: bool) -> None:
    tokens, top_k, outputs = out.shape
    assert tokens <= MOST_TOKENS <= tile.pairs
    _few_tokens_kernel[(triton.cdiv(outputs, tile.outputs), tokens * top_k)](
        x,
        tiles_of(weight.flatten(0, 1), tile.outputs, tile.inputs),
        routed.experts,
        routed.probabilities,
        out,
        row_stride(x),
        tokens,
        TOP_K=top_k,
        PLACES=triton.next_power_of_2(top_k),
        OUTPUTS=outputs,
        INPUTS=weight.shape[2],
        GATED=gated,
        BLOCK_PAIRS=tile.pairs,
        BLOCK_OUTPUTS=tile.outputs,
        BLOCK_INPUTS=tile.inputs,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **launch_options(pdl),
    )


@triton.jit(do_not_specialize=["tokens"])
def _few_tokens_kernel(
    x_ptr: tl.tensor,
    weights: tl.tensor_descriptor,
    experts_ptr: tl.tensor,
    probabilities_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    tokens: tl.tensor,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per pair and tile of outputs. That of an expert's first pair computes all of them, others end.

    The gated kernel waits before it releases the other, which so knows the choice before it waits itself.
    """
    if GATED:
        wait_for_previous(PDL)
    release_next(PDL)
    own = tl.program_id(1)
    row, place = tl.arange(0, BLOCK_PAIRS), tl.arange(0, PLACES)
    is_pair = (row < tokens)[:, None] & (place < TOP_K)[None, :]
    pair = row[:, None] * TOP_K + place[None, :]  # [BLOCK_PAIRS, PLACES]
    chosen = tl.load(experts_ptr + pair, mask=is_pair, other=-1, cache_modifier=".cg")
    expert = tl.load(experts_ptr + own, cache_modifier=".cg")
    same = chosen == expert
    earlier = tl.max(tl.max((same & (pair < own)).to(tl.int32), axis=1), axis=0)
    if (expert < 0) | (earlier == 1):
        if not GATED:
            wait_for_previous(PDL)
    else:
        own_place = tl.sum(tl.where(same, place[None, :], 0), axis=1)
        pair_of_row = tl.minimum(row, tokens - 1) * TOP_K + own_place
        block_products(
            x_ptr,
            weights,
            probabilities_ptr,
            out_ptr,
            x_stride,
            expert,
            0,
            pair_of_row,
            pair_of_row,
            tl.max(same.to(tl.int32), axis=1) == 1,
            TOP_K,
            OUTPUTS,
            INPUTS,
            GATED,
            False,
            BLOCK_PAIRS,
            BLOCK_OUTPUTS,
            BLOCK_INPUTS,
            STAGES,
            PDL,
        )
