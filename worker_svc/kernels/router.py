"""The router's product: few outputs of many inputs, so its inputs are cut into parts, which routing adds up.

The weights of a part are loaded ahead of the kernel before. The norm's weight is applied to the inputs; its factor,
which needs the squares of all parts, only when they are added. One token has a kernel of its own, which norms it too.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.launch import (
    dot,
    launch_options,
    offset_after_previous,
    release_next,
    row_stride,
    wait_for_previous,
)

_PROGRAMS = 256  # about so many fill a GPU
_ROWS_OF_ONE = 8  # outputs of a program, of one token
_COLUMNS_OF_WARP = 512


def router_products(x: Tensor, norm_weight: Tensor, router: Tensor, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """(x * norm_weight) @ router^T and the sum of x^2, by part of the inputs: [S, T, num_experts], [S, T], float32.

    `x` [T, hidden], `norm_weight` [hidden], `router` [num_experts, hidden].
    """
    (tokens, hidden_size), num_experts = x.shape, len(router)
    block, step = (16, 128) if tokens <= _PROGRAMS else (64, 64)
    blocks, steps = triton.cdiv(tokens, block), triton.cdiv(hidden_size, step)
    steps_of_part = triton.next_power_of_2(triton.cdiv(steps, max(_PROGRAMS // blocks, 1)))
    parts = triton.cdiv(steps, steps_of_part)
    products = torch.empty(parts, tokens, num_experts, dtype=torch.float32, device=x.device)
    squares = torch.empty(parts, tokens, dtype=torch.float32, device=x.device)
    _router_kernel[(parts, blocks)](
        x,
        norm_weight,
        router,
        products,
        squares,
        tokens,
        row_stride(x),
        row_stride(router),
        HIDDEN_SIZE=hidden_size,
        NUM_EXPERTS=num_experts,
        EXPERTS=max(triton.next_power_of_2(num_experts), 16),
        BLOCK_TOKENS=block,
        STEP=step,
        STEPS=steps_of_part,
        STAGES=1 if steps_of_part == 1 else 3,
        num_warps=4,
        **launch_options(pdl),
    )
    return products, squares


def router_product_of_one(
    x: Tensor, norm_weight: Tensor, eps: float, router: Tensor, *, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """y = rms_norm(x) of one token, [1, hidden], and y @ router^T, [1, num_experts] float32; arguments as above."""
    num_experts, hidden_size = router.shape
    y = torch.empty_like(x)
    logits = torch.empty(1, num_experts, dtype=torch.float32, device=x.device)
    columns = triton.next_power_of_2(hidden_size)
    _router_of_one_kernel[(triton.cdiv(num_experts, _ROWS_OF_ONE),)](
        x,
        norm_weight,
        router,
        y,
        logits,
        num_experts,
        row_stride(router),
        eps,
        HIDDEN_SIZE=hidden_size,
        ROWS=_ROWS_OF_ONE,
        COLUMNS=columns,
        num_warps=min(max(columns // _COLUMNS_OF_WARP, 1), 16),
        **launch_options(pdl),
    )
    return y, logits


@triton.jit
def _router_of_one_kernel(
    x_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    router_ptr: tl.tensor,
    y_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    num_experts: tl.tensor,
    router_stride: tl.tensor,
    eps: tl.tensor,
    HIDDEN_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per ROWS experts; the first one stores y."""
    release_next(PDL)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside, is_expert = column < HIDDEN_SIZE, row < num_experts
    router_at = router_ptr + row[:, None] * router_stride + column[None, :]
    router = tl.load(router_at, mask=is_expert[:, None] & inside[None, :], other=0)
    norm_weight = tl.load(norm_weight_ptr + column, mask=inside, other=0).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + column, mask=inside, other=0)
    y = x.to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, axis=0) / HIDDEN_SIZE + eps)
    y = (y.to(x.dtype).to(tl.float32) * norm_weight).to(x.dtype)  # rounded between, as by norm.rms_norm
    tl.store(y_ptr + column, y, mask=inside & (tl.program_id(0) == 0))
    logits = tl.sum(router.to(tl.float32) * y.to(tl.float32)[None, :], axis=1)
    tl.store(logits_ptr + row, logits, mask=is_expert)


@triton.jit(do_not_specialize=["tokens"])
def _router_kernel(
    x_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    router_ptr: tl.tensor,
    products_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    tokens: tl.tensor,
    x_stride: tl.tensor,
    router_stride: tl.tensor,
    HIDDEN_SIZE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per part of the inputs and block of tokens."""
    release_next(PDL)
    part = tl.program_id(0)
    token = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    expert = tl.arange(0, EXPERTS)
    column = tl.arange(0, STEP)
    is_expert, is_token = expert < NUM_EXPERTS, token < tokens
    router_at = router_ptr + expert[None, :] * router_stride + column[:, None]  # [STEP, EXPERTS]
    x_at = x_ptr + token.to(tl.int64)[:, None] * x_stride + column[None, :]
    products = tl.zeros([BLOCK_TOKENS, EXPERTS], tl.float32)
    squares = tl.zeros([BLOCK_TOKENS, STEP], tl.float32)
    first = part * STEPS * STEP
    for start in tl.range(first, first + STEPS * STEP, STEP, num_stages=STAGES):
        here = start + column < HIDDEN_SIZE
        router = tl.load(router_at + start, mask=here[:, None] & is_expert[None, :], other=0)
        norm_weight = tl.load(norm_weight_ptr + start + column, mask=here, other=0).to(tl.float32)
        x_start = offset_after_previous(start, STEP, PDL)
        x = tl.load(x_at + x_start, mask=is_token[:, None] & here[None, :], other=0)
        wide = x.to(tl.float32)
        squares += wide * wide
        products += dot((wide * norm_weight[None, :]).to(x.dtype), router)
    row = part * tokens + token
    tl.store(squares_ptr + row, tl.sum(squares, axis=1), mask=is_token)
    at = products_ptr + row.to(tl.int64)[:, None] * NUM_EXPERTS + expert[None, :]
    tl.store(at, products, mask=is_token[:, None] & is_expert[None, :])
