"""RMSNorm (Zhang and Sennrich 2019). Reference: layers.norm.normalize."""

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.launch import launch_options, release_next, row_stride, wait_for_previous

_MANY_ROWS = 512


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor, pdl: bool = False) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight by row. `x` and `out` [T, hidden], which may be the same tensor."""
    tokens, hidden_size = x.shape
    block = triton.next_power_of_2(hidden_size)
    # Of few rows each should be quick; of many, programs that fit beside one another hide each other's waits.
    elements = 256 if tokens < _MANY_ROWS else 512
    _rms_norm_kernel[(tokens,)](
        x,
        weight,
        out,
        row_stride(x),
        row_stride(out),
        eps,
        HIDDEN_SIZE=hidden_size,
        BLOCK=block,
        num_warps=min(max(block // elements, 1), 16),
        **launch_options(pdl),
    )


@triton.jit
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    eps: tl.tensor,
    HIDDEN_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per row."""
    release_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN_SIZE
    weight = tl.load(weight_ptr + column, mask=inside, other=0).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0)
    y = x.to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, axis=0) / HIDDEN_SIZE + eps)
    y = y.to(x.dtype).to(tl.float32) * weight  # rounded between, as the model was trained
    tl.store(out_ptr + row * out_stride + column, y.to(x.dtype), mask=inside)
