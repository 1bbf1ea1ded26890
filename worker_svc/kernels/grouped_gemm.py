"""Products of tokens with the weights of their experts, one launch for all experts.

A program has some outputs of one expert for one block of its pairs, so that with few tokens an expert's weights are
read once. Weights are the left operand: their rows fill the tensor cores' 64, where a block may have 16 tokens.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from shared.errors import StartupError
from worker_svc.kernels.expert_groups import Groups
from worker_svc.kernels.launch import (
    dot,
    launch_options,
    load_inside,
    offset_after_previous,
    release_next,
    row_stride,
    wait_for_previous,
)
from worker_svc.kernels.routing import Routed

_ALIGNMENT = 16  # bytes, of the tensor memory accelerator
_LEAST_AT_WORK = tl.constexpr(64)  # pairs of a block that keeps tensor cores busy; fewer read weights, whatever they do


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
    gated = probabilities is None
    _grouped_kernel[(triton.cdiv(outputs, tile.outputs), most)](
        x if gated else _tiles_of(x, tile.pairs, tile.inputs),
        x if gated else _tiles_of(x, tile.pairs // 2, tile.inputs),
        _tiles_of(weight.flatten(0, 1), tile.outputs, tile.inputs),
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


def _tiles_of(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """For loads by the tensor memory accelerator, which gives zeros past the end."""
    if row_stride(matrix) * matrix.element_size() % _ALIGNMENT:
        raise StartupError(f"rows of {matrix.shape[1]} values: the experts' kernels need a multiple of 16 bytes")
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


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
    elif HALF >= _LEAST_AT_WORK and rows <= HALF:
        _block_products(
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
        _block_products(
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
def _block_products(
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
    """Of one block: `rows` pairs from `first` on, at most BLOCK_PAIRS. `x` is a pointer where GATED, else tiles."""
    row, column = tl.arange(0, BLOCK_PAIRS), tl.arange(0, BLOCK_INPUTS)
    place = first + tl.minimum(row, rows - 1)  # rows too many repeat the last one, and are not stored
    pair = tl.load(pairs_ptr + place, cache_modifier=".cg")
    output = tl.program_id(0) * BLOCK_OUTPUTS
    weight_row = expert * (OUTPUTS * (2 if GATED else 1)) + output
    AHEAD: tl.constexpr = PDL and BLOCK_PAIRS < _LEAST_AT_WORK  # else to wait in the loop costs more than it hides
    if not GATED and not AHEAD:
        wait_for_previous(PDL)
    total = tl.zeros([BLOCK_OUTPUTS, BLOCK_PAIRS], tl.float32)
    total_up = tl.zeros([BLOCK_OUTPUTS, BLOCK_PAIRS], tl.float32)
    for start in tl.range(0, INPUTS, BLOCK_INPUTS, num_stages=STAGES):
        weight = weights.load([weight_row, start])
        if GATED:
            source = x + (pair // TOP_K).to(tl.int64)[None, :] * x_stride + start + column[:, None]
            inputs = load_inside(source, (start + column < INPUTS)[:, None], INPUTS % BLOCK_INPUTS == 0)
            total_up += dot(weights.load([weight_row + OUTPUTS, start]), inputs)
        else:
            inputs = x.load([first, offset_after_previous(start, BLOCK_INPUTS, AHEAD)]).T
        total += dot(weight, inputs)
    if GATED:
        total = total * tl.sigmoid(total) * total_up
        target = place
    else:
        total *= tl.load(probabilities_ptr + pair)[None, :]
        target = pair
    output += tl.arange(0, BLOCK_OUTPUTS)
    out_at = out_ptr + target.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    stored = (row < rows)[:, None] & (output < OUTPUTS)[None, :]
    tl.store(out_at, tl.trans(total).to(out_ptr.dtype.element_ty), mask=stored)
