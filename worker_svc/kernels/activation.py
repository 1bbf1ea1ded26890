"""SwiGLU's activation (Shazeer 2020). Reference: models.qwen3.Qwen3MLP."""

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.launch import launch_options, release_next, row_stride, wait_for_previous

_BLOCK = 1024


def silu_and_mul(gate_up: Tensor, *, out: Tensor, pdl: bool = False) -> None:
    """out = silu(gate) * up. `gate_up` [T, 2 x intermediate], the gate first; `out` [T, intermediate]."""
    tokens, size = out.shape
    _silu_and_mul_kernel[(tokens, triton.cdiv(size, _BLOCK))](
        gate_up, out, row_stride(gate_up), row_stride(out), SIZE=size, BLOCK=_BLOCK, num_warps=4, **launch_options(pdl)
    )


@triton.jit
def _silu_and_mul_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    gate_up_stride: tl.tensor,
    out_stride: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per row and block of columns."""
    release_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    wait_for_previous(PDL)
    source = gate_up_ptr + row * gate_up_stride + column
    gate = tl.load(source, mask=inside, other=0)
    up = tl.load(source + SIZE, mask=inside, other=0)
    wide = gate.to(tl.float32)
    activated = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32)  # rounded between, as the model was trained
    tl.store(out_ptr + row * out_stride + column, (activated * up.to(tl.float32)).to(gate.dtype), mask=inside)
