"""Products of tokens with the weights of their experts, one launch for all experts.

A program has some outputs of one expert for one block of its pairs, so that with few tokens an expert's weights are
read once. Weights are the left operand: their rows fill the tensor cores' 64, where a block may have 16 tokens.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.expert_groups import Groups
from worker_svc.kernels.launch import dot, launch_options, load_inside, release_next, row_stride, wait_for_previous
from worker_svc.kernels.routing import Routed


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes, and how."""

    pairs: int
    outputs: int
    """Of gate and of up each, where there are both."""
    inputs: int
    """Loaded at a time."""
    num_warps: int
    num_stages: int


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
    _grouped_kernel[(triton.cdiv(outputs, tile.outputs), most)](
        x,
        weight,
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
        GATED=probabilities is None,
        BLOCK_PAIRS=tile.pairs,
        BLOCK_OUTPUTS=tile.outputs,
        BLOCK_INPUTS=tile.inputs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch_options(pdl),
    )


@triton.jit
def _grouped_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
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
    PDL: tl.constexpr,
) -> None:
    """One program per block of pairs and tile of outputs; those past the last block end at once."""
    release_next(PDL)
    block = tl.program_id(1)
    wait_for_previous(PDL)
    if block >= tl.load(num_blocks_ptr):
        return
    expert = tl.load(blocks_ptr + block).to(tl.int64)
    first = tl.load(blocks_ptr + most + block)
    rows = tl.load(blocks_ptr + 2 * most + block)
    row = tl.arange(0, BLOCK_PAIRS)
    place = first + tl.minimum(row, rows - 1)  # rows and outputs too many repeat the last one, and are not stored
    pair = tl.load(pairs_ptr + place)
    source = (pair // TOP_K if GATED else place).to(tl.int64)
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    weight_row = tl.minimum(output, OUTPUTS - 1)
    column = tl.arange(0, BLOCK_INPUTS)
    x_at = x_ptr + source[None, :] * x_stride + column[:, None]  # [BLOCK_INPUTS, BLOCK_PAIRS]
    weight_ptr += expert * ((2 if GATED else 1) * OUTPUTS * INPUTS)
    weight_at = weight_ptr + weight_row[:, None] * INPUTS + column[None, :]  # [BLOCK_OUTPUTS, BLOCK_INPUTS]
    total = tl.zeros([BLOCK_OUTPUTS, BLOCK_PAIRS], tl.float32)
    total_up = tl.zeros([BLOCK_OUTPUTS, BLOCK_PAIRS], tl.float32)
    WHOLE: tl.constexpr = INPUTS % BLOCK_INPUTS == 0
    for start in range(0, INPUTS, BLOCK_INPUTS):
        inside = start + column < INPUTS
        x = load_inside(x_at + start, inside[:, None], WHOLE)
        total += dot(load_inside(weight_at + start, inside[None, :], WHOLE), x)
        if GATED:
            total_up += dot(load_inside(weight_at + OUTPUTS * INPUTS + start, inside[None, :], WHOLE), x)
    if GATED:
        total = total * tl.sigmoid(total) * total_up
        target = place
    else:
        total *= tl.load(probabilities_ptr + pair)[None, :]
        target = pair
    out_at = out_ptr + target.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    stored = (row < rows)[:, None] & (output < OUTPUTS)[None, :]
    tl.store(out_at, tl.trans(total).to(out_ptr.dtype.element_ty), mask=stored)
