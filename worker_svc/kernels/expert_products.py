"""The inner part of the experts' products: one expert's weights times one block of pairs, for whichever kernel found
the block. Weights are the left operand: their rows fill the tensor cores' 64, where a block may have 16 tokens.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from shared.errors import StartupError
from worker_svc.kernels.launch import dot, load_inside, offset_after_previous, row_stride, wait_for_previous

_ALIGNMENT = 16  # bytes, of the tensor memory accelerator
LEAST_AT_WORK = tl.constexpr(64)
"""Pairs of a block that keeps tensor cores busy; fewer read weights, whatever they do."""


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


def tiles_of(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """For loads by the tensor memory accelerator, which gives zeros past the end."""
    if row_stride(matrix) * matrix.element_size() % _ALIGNMENT:
        raise StartupError(f"rows of {matrix.shape[1]} values: the experts' kernels need a multiple of 16 bytes")
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


@triton.jit
def block_products(
    x: tl.tensor,
    weights: tl.tensor_descriptor,
    probabilities_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    expert: tl.tensor,
    first: tl.tensor,
    pair: tl.tensor,
    place: tl.tensor,
    inside: tl.tensor,
    TOP_K: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GATED: tl.constexpr,
    IN_TILES: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Outputs of program_id(0) for the pairs `pair` [BLOCK_PAIRS], of which those `inside` are stored; all may be read.

    GATED: silu(gate) * up of the pairs' tokens, stored at `place`. Else probability x product of the rows `place`,
    stored at the pairs; x is tiles of rows from `first` on if IN_TILES, else a pointer, as always where GATED.
    """
    column = tl.arange(0, BLOCK_INPUTS)
    output = tl.program_id(0) * BLOCK_OUTPUTS
    weight_row = expert * (OUTPUTS * (2 if GATED else 1)) + output
    source_row = (pair // TOP_K if GATED else place).to(tl.int64)
    AHEAD: tl.constexpr = PDL and BLOCK_PAIRS < LEAST_AT_WORK  # else to wait in the loop costs more than it hides
    if not GATED and not AHEAD:
        wait_for_previous(PDL)
    total = tl.zeros([BLOCK_OUTPUTS, BLOCK_PAIRS], tl.float32)
    total_up = tl.zeros([BLOCK_OUTPUTS, BLOCK_PAIRS], tl.float32)
    for start in tl.range(0, INPUTS, BLOCK_INPUTS, num_stages=STAGES):
        weight = weights.load([weight_row, start])
        at = start if GATED else offset_after_previous(start, BLOCK_INPUTS, AHEAD)
        if IN_TILES:
            inputs = x.load([first, at]).T
        else:
            source = x + source_row[None, :] * x_stride + at + column[:, None]
            inputs = load_inside(source, (start + column < INPUTS)[:, None], INPUTS % BLOCK_INPUTS == 0)
        if GATED:
            total_up += dot(weights.load([weight_row + OUTPUTS, start]), inputs)
        total += dot(weight, inputs)
    if GATED:
        total = total * tl.sigmoid(total) * total_up
        target = place
    else:
        total *= tl.load(probabilities_ptr + pair)[None, :]
        target = pair
    output += tl.arange(0, BLOCK_OUTPUTS)
    out_at = out_ptr + target.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    stored = inside[:, None] & (output < OUTPUTS)[None, :]
    tl.store(out_at, tl.trans(total).to(out_ptr.dtype.element_ty), mask=stored)
