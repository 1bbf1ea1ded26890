"""A matrix times one vector, for decode steps of one row. Reference: torch.nn.functional.linear.

The weights, all that such a step reads, are loaded before the kernel waits for the one before: with programmatic
dependent launch the memory is never idle between two layers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.launch import launch_options, release_next, row_stride, wait_for_previous

_MOST_COLUMNS = 4096  # of a tile
_WIDE = 4096  # outputs from which programs of more rows fill the GPU


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None, *, pdl: bool = False) -> Tensor:
    """`x` [1, in_features], `weight` [out_features, in_features], `bias` [out_features]; gives [1, out_features]."""
    outputs, inputs = weight.shape
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    columns = min(triton.next_power_of_2(inputs), _MOST_COLUMNS)
    rows = 16 if outputs >= _WIDE and columns <= 1024 else 8
    _gemv_kernel[(triton.cdiv(outputs, rows),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        outputs,
        row_stride(weight),
        INPUTS=inputs,
        HAS_BIAS=bias is not None,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=8 if rows * columns > 8192 else 4,
        **launch_options(pdl),
    )
    return out


@triton.jit
def _gemv_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    outputs: tl.tensor,
    weight_stride: tl.tensor,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per ROWS outputs."""
    release_next(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = row < outputs
    source = weight_ptr + row.to(tl.int64)[:, None] * weight_stride + column[None, :]
    weight = tl.load(source, mask=inside[:, None] & (column < INPUTS)[None, :], other=0)  # [ROWS, COLUMNS]
    bias = tl.zeros([ROWS], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + row, mask=inside, other=0).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + column, mask=column < INPUTS, other=0).to(tl.float32)
    total = tl.sum(weight.to(tl.float32) * x[None, :], axis=1)
    for start in range(COLUMNS, INPUTS, COLUMNS):
        here = start + column < INPUTS
        weight = tl.load(source + start, mask=inside[:, None] & here[None, :], other=0)
        x = tl.load(x_ptr + start + column, mask=here, other=0).to(tl.float32)
        total += tl.sum(weight.to(tl.float32) * x[None, :], axis=1)
    tl.store(out_ptr + row, (total + bias).to(out_ptr.dtype.element_ty), mask=inside)
