"""A matrix times one vector, for decode steps of one row, with what stands around it: the norm of the vector, bias,
SwiGLU's activation, the residual. Reference: layers.torch_ops.

The weights, all that such a step reads, are loaded before the kernel waits for the one before: with programmatic
dependent launch the memory is never idle between two layers.
"""

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.launch import launch_options, release_next, row_stride, wait_for_previous

_MOST_COLUMNS = 4096  # of a tile
_WIDE = 4096  # outputs from which programs of more rows fill the GPU
_FOUR_WARPS = 16_384  # weights that four warps hold at most


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """x @ weight^T + bias, of rms_norm(x) where `norm_weight` [in_features] is given; with `gated` silu(gate) * up of
    its halves; plus `residual`, which takes the sum.

    `x` [1, in_features], `weight` [out_features, in_features], twice as many rows where it is gated. Gives
    [1, out_features].
    """
    inputs = weight.shape[1]
    outputs = len(weight) // 2 if gated else len(weight)
    out = x.new_empty(1, outputs) if residual is None else residual
    columns = min(triton.next_power_of_2(inputs), _MOST_COLUMNS)
    rows = 16 if outputs >= _WIDE and columns <= 1024 else 8
    if gated and columns > 1024:
        rows //= 2
    _gemv_kernel[(triton.cdiv(outputs, rows),)](
        x,
        weight,
        weight[outputs:] if gated else weight,
        weight if bias is None else bias,
        weight if norm_weight is None else norm_weight,
        out,
        outputs,
        row_stride(weight),
        eps,
        INPUTS=inputs,
        NORM=norm_weight is not None,
        GATED=gated,
        HAS_BIAS=bias is not None,
        ADD=residual is not None,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=8 if gated or rows * columns > _FOUR_WARPS else 4,
        **launch_options(pdl),
    )
    return out


@triton.jit
def _gemv_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    up_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    out_ptr: tl.tensor,
    outputs: tl.tensor,
    weight_stride: tl.tensor,
    eps: tl.tensor,
    INPUTS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per ROWS outputs."""
    release_next(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = row < outputs
    offset = row.to(tl.int64)[:, None] * weight_stride + column[None, :]
    mask = inside[:, None] & (column < INPUTS)[None, :]
    weight = tl.load(weight_ptr + offset, mask=mask, other=0)  # [ROWS, COLUMNS]
    up = weight
    if GATED:
        up = tl.load(up_ptr + offset, mask=mask, other=0)
    norm = tl.full([COLUMNS], 1, tl.float32)
    if NORM:
        norm = tl.load(norm_ptr + column, mask=column < INPUTS, other=0).to(tl.float32)
    bias = tl.zeros([ROWS], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + row, mask=inside, other=0).to(tl.float32)
    wait_for_previous(PDL)
    residual = tl.zeros([ROWS], tl.float32)
    if ADD:
        residual = tl.load(out_ptr + row, mask=inside, other=0).to(tl.float32)
    x = tl.load(x_ptr + column, mask=column < INPUTS, other=0).to(tl.float32)
    square = tl.sum(x * x, axis=0)
    x *= norm
    total = tl.sum(weight.to(tl.float32) * x[None, :], axis=1)
    up_total = tl.sum(up.to(tl.float32) * x[None, :], axis=1) if GATED else total
    for start in range(COLUMNS, INPUTS, COLUMNS):
        here = start + column < INPUTS
        mask = inside[:, None] & here[None, :]
        x = tl.load(x_ptr + start + column, mask=here, other=0).to(tl.float32)
        square += tl.sum(x * x, axis=0)
        if NORM:
            x *= tl.load(norm_ptr + start + column, mask=here, other=0).to(tl.float32)
        weight = tl.load(weight_ptr + offset + start, mask=mask, other=0)
        total += tl.sum(weight.to(tl.float32) * x[None, :], axis=1)
        if GATED:
            up = tl.load(up_ptr + offset + start, mask=mask, other=0)
            up_total += tl.sum(up.to(tl.float32) * x[None, :], axis=1)
    if NORM:
        scale = tl.rsqrt(square / INPUTS + eps)
        total *= scale
        up_total *= scale
    total += bias
    if GATED:
        total = total * tl.sigmoid(total) * up_total
    tl.store(out_ptr + row, (total + residual).to(out_ptr.dtype.element_ty), mask=inside)
