"""The experts of one token: as many matrix-vector products as it has, in two launches. Nothing is sorted.

Each program finds its experts in the router's logits, which costs less than a launch: programs are one warp, whose
reductions are single instructions.
"""

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.launch import launch_options, release_next, wait_for_previous
from worker_svc.kernels.routing import Choice, best_experts

_GATED_BYTES = 8192  # of a row of weights that a warp holds
_DOWN_BYTES = 24_576  # of weights of all experts that a warp holds
_DOWN_COLUMNS = (64, 256)  # of a program's tiles, least and most


def gated_products_of_one(y: Tensor, logits: Tensor, weight: Tensor, choice: Choice, *, pdl: bool = False) -> Tensor:
    """silu(gate) * up for each expert of one token, [top_k, width]; those of other ranks are left undefined.

    `y` [1, hidden], normed, and `logits` [1, num_experts]: see router.router_product_of_one. `weight`
    [experts here, 2 x width, hidden].
    """
    width, hidden_size = weight.shape[1] // 2, weight.shape[2]
    out = y.new_empty(choice.top_k, width)
    columns = triton.next_power_of_2(hidden_size)
    _gated_kernel[(width, choice.top_k)](
        y,
        logits,
        weight,
        out,
        choice.first,
        choice.num_local,
        NUM_EXPERTS=logits.shape[1],
        TOP_K=choice.top_k,
        RENORMALIZE=choice.renormalize,
        WIDTH=width,
        HIDDEN_SIZE=hidden_size,
        EXPERTS=max(triton.next_power_of_2(logits.shape[1]), 2),
        PLACES=triton.next_power_of_2(choice.top_k),
        COLUMNS=columns,
        num_warps=triton.cdiv(columns * y.element_size(), _GATED_BYTES),
        **launch_options(pdl),
    )
    return out


def weighted_sum_of_one(
    x: Tensor, weight: Tensor, logits: Tensor, choice: Choice, residual: Tensor | None, *, pdl: bool = False
) -> Tensor:
    """`residual`, which is overwritten, or zeros, plus the sum of probability x product over the experts, [1, hidden].

    `x` [top_k, width], `weight` [experts here, hidden, width], `logits` [1, num_experts], `residual` [1, hidden].
    The kernel before must be that of gated_products_of_one.
    """
    hidden_size, width = weight.shape[1:]
    out = x.new_empty(1, hidden_size) if residual is None else residual
    bytes_of_row = choice.top_k * width * x.element_size()
    rows = 1 << max((_DOWN_BYTES // bytes_of_row).bit_length() - 1, 0)
    _down_kernel[(triton.cdiv(hidden_size, rows),)](
        x,
        logits,
        weight,
        out,
        choice.first,
        choice.num_local,
        NUM_EXPERTS=logits.shape[1],
        TOP_K=choice.top_k,
        RENORMALIZE=choice.renormalize,
        WIDTH=width,
        HIDDEN_SIZE=hidden_size,
        EXPERTS=max(triton.next_power_of_2(logits.shape[1]), 2),
        PLACES=triton.next_power_of_2(choice.top_k),
        ADD=residual is not None,
        ROWS=rows,
        COLUMNS=min(max(width & -width, _DOWN_COLUMNS[0]), _DOWN_COLUMNS[1]),
        num_warps=triton.next_power_of_2(triton.cdiv(bytes_of_row, _DOWN_BYTES)),
        **launch_options(pdl),
    )
    return out


@triton.jit
def _gated_kernel(
    y_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first: tl.tensor,
    num_local: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    PLACES: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per expert of the token and output. It waits before it releases the next kernel, which so knows the
    logits before it waits itself."""
    wait_for_previous(PDL)
    release_next(PDL)
    row, own, column = tl.program_id(0), tl.program_id(1), tl.arange(0, COLUMNS)
    inside = column < HIDDEN_SIZE
    chosen, _ = _experts_of(logits_ptr, NUM_EXPERTS, TOP_K, RENORMALIZE, EXPERTS, PLACES)
    expert = tl.sum(tl.where(tl.arange(0, PLACES) == own, chosen, 0), axis=0) - first
    if (expert >= 0) & (expert < num_local):
        source = weight_ptr + expert.to(tl.int64) * (2 * WIDTH * HIDDEN_SIZE) + row * HIDDEN_SIZE + column
        y = tl.load(y_ptr + column, mask=inside, other=0).to(tl.float32)
        gate_weight = tl.load(source, mask=inside, other=0)
        up_weight = tl.load(source + WIDTH * HIDDEN_SIZE, mask=inside, other=0)
        gate = tl.sum(gate_weight.to(tl.float32) * y, axis=0)
        up = tl.sum(up_weight.to(tl.float32) * y, axis=0)
        tl.store(out_ptr + own * WIDTH + row, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty))


@triton.jit
def _down_kernel(
    x_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first: tl.tensor,
    num_local: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    PLACES: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per ROWS outputs. The weights of all experts are on the way together, before it waits."""
    release_next(PDL)
    row, column, place = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, PLACES)
    chosen, p = _experts_of(logits_ptr, NUM_EXPERTS, TOP_K, RENORMALIZE, EXPERTS, PLACES)
    local = chosen - first
    local = tl.where((local >= 0) & (local < num_local), local, -1)
    weights = ()
    for k in tl.static_range(TOP_K):
        expert = tl.sum(tl.where(place == k, local, 0), axis=0)
        source = weight_ptr + tl.maximum(expert, 0).to(tl.int64) * (HIDDEN_SIZE * WIDTH)
        for start in tl.static_range(0, WIDTH, COLUMNS):
            inside = (row < HIDDEN_SIZE)[:, None] & (start + column < WIDTH)[None, :] & (expert >= 0)
            source_tile = source + row[:, None] * WIDTH + start + column[None, :]
            weights += (tl.load(source_tile, mask=inside, other=0),)  # type: ignore[assignment]  # a tuple grows
    wait_for_previous(PDL)
    products = tl.zeros([ROWS, COLUMNS], tl.float32)
    TILES: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    for k in tl.static_range(TOP_K):
        here = tl.sum(tl.where(place == k, local, 0), axis=0) >= 0
        probability = tl.sum(tl.where(place == k, p, 0.0), axis=0)
        for tile in tl.static_range(TILES):
            at = tile * COLUMNS + column
            x = tl.load(x_ptr + k * WIDTH + at, mask=(at < WIDTH) & here, other=0).to(tl.float32)
            products += weights[k * TILES + tile].to(tl.float32) * (x * probability)[None, :]
    total = tl.sum(products, axis=1)
    if ADD:
        total += tl.load(out_ptr + row, mask=row < HIDDEN_SIZE, other=0).to(tl.float32)
    tl.store(out_ptr + row, total.to(out_ptr.dtype.element_ty), mask=row < HIDDEN_SIZE)


@triton.jit
def _experts_of(
    logits_ptr: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    PLACES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """See best_experts."""
    index = tl.arange(0, EXPERTS)
    logit = tl.load(logits_ptr + index, mask=index < NUM_EXPERTS, other=-float("inf"), cache_modifier=".cg")
    chosen, p = best_experts(logit.to(tl.float32), TOP_K, RENORMALIZE, EXPERTS, PLACES)
    return chosen, p
