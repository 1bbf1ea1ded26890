"""Products of tokens with the weights of their experts, one launch for all experts.

A program has some outputs of one expert for one block of its pairs, so that with few tokens an expert's weights are
read once. For at most 16 tokens see few_tokens_gemm.
"""

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.expert_groups import Groups
from worker_svc.kernels.expert_products import LEAST_AT_WORK, Tile, block_products, tiles_of
from worker_svc.kernels.launch import launch_options, release_next, row_stride, wait_for_previous
from worker_svc.kernels.routing import Routed


def gated_products(x: Tensor, weight: Tensor, groups: Groups, top_k: int, tile: Tile, *, pdl: bool = False) -> Tensor:
    """silu(gate) * up of each pair's expert and token, [P, width], in the order of `groups.pairs`.

    `x` [T, hidden], `weight` [experts, 2 x width, hidden], the rows of gate first.
    """
    width = weight.shape[1] // 2
    out = x.new_empty(len(groups.pairs), width)
    _launch(x, weight, groups, None, out, top_k, tile, pdl)
    return out


def weighted_products(
    x: Tensor, weight: Tensor, groups: Groups, routed: Routed, tile: Tile, *, pdl: bool = False
) -> Tensor:
    """Probability x product of each pair, [T, top_k, hidden]; pairs of no expert are left undefined.

    `x` [P, width] in the order of `groups.pairs`, `weight` [experts, hidden, width].
    """
    tokens, top_k = routed.experts.shape
    out = x.new_empty(tokens, top_k, weight.shape[1])
    _launch(x, weight, groups, routed.probabilities, out, top_k, tile, pdl)
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    groups: Groups,
    probabilities: Tensor | None,
    out: Tensor,
    top_k: int,
    tile: Tile,
    pdl: bool,
) -> None:
    outputs, most = out.shape[-1], groups.blocks.shape[1]
    gated = probabilities is None
    _grouped_kernel[(triton.cdiv(outputs, tile.outputs), most)](
        x if gated else tiles_of(x, tile.pairs, tile.inputs),
        x if gated else tiles_of(x, tile.pairs // 2, tile.inputs),
        tiles_of(weight.flatten(0, 1), tile.outputs, tile.inputs),
        groups.pairs,
        groups.blocks,
        groups.num_blocks,
        groups.pairs if probabilities is None else probabilities,
        out,
        row_stride(x),
        most,
        TOP_K=top_k,
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


@triton.jit(do_not_specialize=["most"])
def _grouped_kernel(
    x: tl.tensor,
    half_x: tl.tensor,
    weights: tl.tensor_descriptor,
    pairs_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    num_blocks_ptr: tl.tensor,
    probabilities_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    most: tl.tensor,
    TOP_K: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per block of pairs and tile of outputs; those past the last block end at once.

    The gated kernel waits before it releases the other, which so knows the groups before it waits itself.
    """
    if GATED:
        wait_for_previous(PDL)
    release_next(PDL)
    block_ptr = blocks_ptr + tl.program_id(1)
    expert = tl.load(block_ptr, cache_modifier=".cg")  # undefined past the last block, but not waited for
    first = tl.load(block_ptr + most, cache_modifier=".cg")
    rows = tl.load(block_ptr + 2 * most, cache_modifier=".cg")
    HALF: tl.constexpr = BLOCK_PAIRS // 2
    if tl.program_id(1) >= tl.load(num_blocks_ptr, cache_modifier=".cg"):
        if not GATED:
            wait_for_previous(PDL)
    elif HALF >= LEAST_AT_WORK and rows <= HALF:
        _listed_products(
            half_x,
            weights,
            pairs_ptr,
            probabilities_ptr,
            out_ptr,
            x_stride,
            expert,
            first,
            rows,
            TOP_K,
            OUTPUTS,
            INPUTS,
            GATED,
            HALF,
            BLOCK_OUTPUTS,
            BLOCK_INPUTS,
            STAGES,
            PDL,
        )
    else:
        _listed_products(
            x,
            weights,
            pairs_ptr,
            probabilities_ptr,
            out_ptr,
            x_stride,
            expert,
            first,
            rows,
            TOP_K,
            OUTPUTS,
            INPUTS,
            GATED,
            BLOCK_PAIRS,
            BLOCK_OUTPUTS,
            BLOCK_INPUTS,
            STAGES,
            PDL,
        )


@triton.jit
def _listed_products(
    x: tl.tensor,
    weights: tl.tensor_descriptor,
    pairs_ptr: tl.tensor,
    probabilities_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    expert: tl.tensor,
    first: tl.tensor,
    rows: tl.tensor,
    TOP_K: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Of one block: `rows` pairs from `first` on, at most BLOCK_PAIRS. See block_products."""
    row = tl.arange(0, BLOCK_PAIRS)
    place = first + tl.minimum(row, rows - 1)  # rows too many repeat the last one, and are not stored
    pair = tl.load(pairs_ptr + place, cache_modifier=".cg")
    block_products(
        x,
        weights,
        probabilities_ptr,
        out_ptr,
        x_stride,
        expert,
        first,
        pair,
        place,
        row < rows,
        TOP_K,
        OUTPUTS,
        INPUTS,
        GATED,
        not GATED,
        BLOCK_PAIRS,
        BLOCK_OUTPUTS,
        BLOCK_INPUTS,
        STAGES,
        PDL,
    )
