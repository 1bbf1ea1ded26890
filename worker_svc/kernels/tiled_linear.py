"""Matrix products of more rows than kernels.fused_linear takes, up to 64, with what stands around them: bias, SwiGLU's
activation, the residual. Reference: layers.torch_ops.

Weights are the left operand of the tensor cores, which take outputs by 64; so a program reads the rows once for as
many outputs. With programmatic dependent launch its first weights are on their way before the kernel ahead ends.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from worker_svc.kernels.launch import (
    dot,
    launch_options,
    offset_after_previous,
    release_next,
    row_stride,
    shared_memory,
)

MAX_ROWS = 64
_MOST_INPUTS = 4096
_OUTPUTS, _INPUTS = 64, 128  # of a tile
_FEWEST_TILES = 48  # where programs are fewer than that, or have more inputs, libraries divide the inputs among several
_SHARED_MEMORY = 227 << 10  # of compute capability 9.0, which has tensor descriptors too


def is_faster_in_tiles(x: Tensor, weight: Tensor, *, gated: bool = False) -> bool:
    """Whether tiled_linear takes this product, and less time than a library with kernels before or after it: as
    measured with 64 rows at the shapes of Qwen3-0.6B and, on one GPU and on two, Qwen3-8B. Fewer rows, which were not
    timed, read the same weights."""
    rows, inputs = x.shape
    tiles = triton.cdiv(len(weight) // 2 if gated else len(weight), _OUTPUTS)
    fits = x.element_size() == 2 and inputs % 8 == 0 and shared_memory(x.device) >= _SHARED_MEMORY
    return fits and rows <= MAX_ROWS and inputs <= _MOST_INPUTS and tiles >= _FEWEST_TILES


def tiled_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    residual: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """As gemv.gemv without a norm, of `x` [T, in_features] of at most MAX_ROWS rows, in 16 bits. Gives
    [T, out_features]. Rows of `x` and of `weight` begin at multiples of 16 bytes."""
    rows, inputs = x.shape
    outputs = len(weight) // 2 if gated else len(weight)
    assert rows <= MAX_ROWS
    out = x.new_empty(rows, outputs) if residual is None else residual
    _tiled_linear_kernel[(triton.cdiv(outputs, _OUTPUTS),)](
        TensorDescriptor.from_tensor(x, [MAX_ROWS, _INPUTS]),
        TensorDescriptor.from_tensor(weight, [_OUTPUTS, _INPUTS]),
        weight if bias is None else bias,
        out,
        rows,
        outputs,
        inputs,
        row_stride(out),
        GATED=gated,
        HAS_BIAS=bias is not None,
        ADD=residual is not None,
        ROWS=MAX_ROWS,
        OUTPUTS=_OUTPUTS,
        INPUTS=_INPUTS,
        STAGES=4 if gated else 6,  # fill the shared memory
        num_warps=4,
        **launch_options(pdl),
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _tiled_linear_kernel(
    x_desc: tl.tensor_descriptor,
    weight_desc: tl.tensor_descriptor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    out_stride: tl.tensor,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per OUTPUTS outputs. What lies beyond rows, outputs and inputs is loaded as zeros."""
    release_next(PDL)
    first = tl.program_id(0) * OUTPUTS
    output, row = first + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    inside = output < outputs
    y = tl.zeros([OUTPUTS, ROWS], tl.float32)
    up_y = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in tl.range(0, inputs, INPUTS, num_stages=STAGES):
        weight = weight_desc.load([first, start])
        if GATED:
            up = weight_desc.load([outputs + first, start])
        x = x_desc.load([0, offset_after_previous(start, INPUTS, PDL)]).T  # [INPUTS, ROWS]
        y += dot(weight, x)
        if GATED:
            up_y += dot(up, x)
    if HAS_BIAS:
        y += tl.load(bias_ptr + output, mask=inside, other=0).to(tl.float32)[:, None]
    if GATED:
        y = y * tl.sigmoid(y) * up_y
    target = out_ptr + row[None, :] * out_stride + output[:, None]
    mask = (row < rows)[None, :] & inside[:, None]
    if ADD:
        y += tl.load(target, mask=mask, other=0).to(tl.float32)
    tl.store(target, y.to(out_ptr.dtype.element_ty), mask=mask)
