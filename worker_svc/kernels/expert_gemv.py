"""The experts of one token: as many matrix-vector products as it has, in two launches. Nothing is sorted."""

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.launch import launch_options, release_next, wait_for_previous
from worker_svc.kernels.routing import Routed

_GATED_ELEMENTS = 8192  # of each of a program's two tiles, which registers hold
_DOWN_ELEMENTS = 4096  # of a program's tile of each expert's weights


def gated_products_of_one(x: Tensor, weight: Tensor, routed: Routed, *, pdl: bool = False) -> Tensor:
    """silu(gate) * up for each expert of one token, [top_k, width]; those of other ranks are left undefined.

    `x` [1, hidden], `weight` [experts here, 2 x width, hidden].
    """
    top_k, width, hidden_size = routed.experts.shape[1], weight.shape[1] // 2, weight.shape[2]
    out = x.new_empty(top_k, width)
    columns = triton.next_power_of_2(hidden_size)
    rows = min(max(_GATED_ELEMENTS // columns, 1), 16)
    _gated_kernel[(top_k, triton.cdiv(width, rows))](
        x,
        weight,
        routed.experts,
        out,
        WIDTH=width,
        HIDDEN_SIZE=hidden_size,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
        **launch_options(pdl),
    )
    return out


def weighted_sum_of_one(
    x: Tensor, weight: Tensor, routed: Routed, residual: Tensor | None, *, pdl: bool = False
) -> Tensor:
    """`residual`, which is overwritten, or zeros, plus the sum of probability x product over the experts, [1, hidden].

    `x` [top_k, width], `weight` [experts here, hidden, width], `residual` [1, hidden]. The kernel before must be that
    of gated_products_of_one.
    """
    hidden_size, width = weight.shape[1:]
    out = x.new_empty(1, hidden_size) if residual is None else residual
    columns = triton.next_power_of_2(width)
    rows = min(max(_DOWN_ELEMENTS // columns, 1), 16)
    _down_kernel[(triton.cdiv(hidden_size, rows),)](
        x,
        weight,
        routed.probabilities,
        routed.experts,
        out,
        TOP_K=len(x),
        WIDTH=width,
        HIDDEN_SIZE=hidden_size,
        ADD=residual is not None,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
        **launch_options(pdl),
    )
    return out


@triton.jit
def _gated_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    WIDTH: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per expert of the token and ROWS outputs. It waits before it releases the next kernel, which so
    knows the experts before it waits itself."""
    wait_for_previous(PDL)
    release_next(PDL)
    place = tl.program_id(0)
    expert = tl.load(experts_ptr + place).to(tl.int64)
    row, column = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    if expert >= 0:
        inside = (row < WIDTH)[:, None] & (column < HIDDEN_SIZE)[None, :]
        source = weight_ptr + expert * (2 * WIDTH * HIDDEN_SIZE) + row[:, None] * HIDDEN_SIZE + column[None, :]
        gate_weight = tl.load(source, mask=inside, other=0)  # [ROWS, COLUMNS]
        up_weight = tl.load(source + WIDTH * HIDDEN_SIZE, mask=inside, other=0)
        x = tl.load(x_ptr + column, mask=column < HIDDEN_SIZE, other=0).to(tl.float32)
        gate = tl.sum(gate_weight.to(tl.float32) * x[None, :], axis=1)
        up = tl.sum(up_weight.to(tl.float32) * x[None, :], axis=1)
        out = (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + place * WIDTH + row, out, mask=row < WIDTH)


@triton.jit
def _down_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    probabilities_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per ROWS outputs. It reduces once, at the end: the weights of all experts are on the way together,
    before it waits."""
    release_next(PDL)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    experts, probabilities, weights = (), (), ()
    for place in tl.static_range(TOP_K):
        experts += (tl.load(experts_ptr + place, cache_modifier=".cg"),)
        probabilities += (tl.load(probabilities_ptr + place, cache_modifier=".cg"),)
    for place in tl.static_range(TOP_K):
        source = weight_ptr + tl.maximum(experts[place], 0).to(tl.int64) * (HIDDEN_SIZE * WIDTH)
        for start in tl.static_range(0, WIDTH, COLUMNS):
            inside = (row < HIDDEN_SIZE)[:, None] & (start + column < WIDTH)[None, :] & (experts[place] >= 0)
            weights += (tl.load(source + row[:, None] * WIDTH + start + column[None, :], mask=inside, other=0),)
    wait_for_previous(PDL)
    products = tl.zeros([ROWS, COLUMNS], tl.float32)
    TILES: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    for place in tl.static_range(TOP_K):
        for tile in tl.static_range(TILES):
            at = tile * COLUMNS + column
            x = tl.load(x_ptr + place * WIDTH + at, mask=(at < WIDTH) & (experts[place] >= 0), other=0)
            products += (
                weights[place * TILES + tile].to(tl.float32) * (x.to(tl.float32) * probabilities[place])[None, :]
            )
    total = tl.sum(products, axis=1)
    if ADD:
        total += tl.load(out_ptr + row, mask=row < HIDDEN_SIZE, other=0).to(tl.float32)
    tl.store(out_ptr + row, total.to(out_ptr.dtype.element_ty), mask=row < HIDDEN_SIZE)
