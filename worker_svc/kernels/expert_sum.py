"""Adds what a token's experts gave, always in the same order."""

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.launch import launch_options, release_next, wait_for_previous

_BLOCK = 1024


def sum_experts(products: Tensor, experts: Tensor, *, out: Tensor, add: bool, pdl: bool = False) -> None:
    """out = the sum of a token's products, or out += it if `add`. `products` [T, top_k, hidden], `out` [T, hidden].

    A product whose expert, `experts` [T, top_k] int32, is negative is not read.
    """
    tokens, top_k, hidden_size = products.shape
    _sum_kernel[(tokens, triton.cdiv(hidden_size, _BLOCK))](
        products,
        experts,
        out,
        out.stride(0),
        HIDDEN_SIZE=hidden_size,
        TOP_K=top_k,
        ADD=add,
        BLOCK=_BLOCK,
        num_warps=4,
        **launch_options(pdl),
    )


@triton.jit
def _sum_kernel(
    products_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_stride: tl.tensor,
    HIDDEN_SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per token and block of columns."""
    release_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN_SIZE
    wait_for_previous(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        here = tl.load(experts_ptr + pair) >= 0
        total += tl.load(products_ptr + pair * HIDDEN_SIZE + column, mask=inside & here, other=0).to(tl.float32)
    target = out_ptr + token * out_stride + column
    if ADD:
        total += tl.load(target, mask=inside, other=0).to(tl.float32)
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=inside)
