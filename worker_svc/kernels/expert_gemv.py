"""The mixture-of-experts layer of one token: as many matrix-vector products as it has experts, in two launches.

Nothing is sorted. Each program of the first finds its expert in the router's logits, which costs less than a launch.
"""

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.launch import launch_options, release_next, wait_for_previous
from worker_svc.kernels.routing import Choice, Routed, empty_routed, ranked_experts

_GATED_ELEMENTS = 16384  # of each of a program's two tiles, which registers hold
_DOWN_ROWS = 4


def gated_products_of_one(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    logits: Tensor,
    weight: Tensor,
    choice: Choice,
    *,
    pdl: bool = False,
) -> tuple[Tensor, Routed]:
    """silu(gate) * up of rms_norm(x) for each expert of one token, [top_k, width], and which those are.

    `x` [1, hidden], `logits` [1, num_experts], `weight` [experts here, 2 x width, hidden].
    """
    width, hidden_size = weight.shape[1] // 2, weight.shape[2]
    out, routed = x.new_empty(choice.top_k, width), empty_routed(1, choice.top_k, x.device)
    columns = triton.next_power_of_2(hidden_size)
    rows = min(max(_GATED_ELEMENTS // columns, 1), 16)
    _gated_kernel[(choice.top_k, triton.cdiv(width, rows))](
        x,
        norm_weight,
        logits,
        weight,
        routed.probabilities,
        routed.experts,
        out,
        eps,
        choice.first,
        choice.num_local,
        NUM_EXPERTS=logits.shape[1],
        TOP_K=choice.top_k,
        RENORMALIZE=choice.renormalize,
        WIDTH=width,
        HIDDEN_SIZE=hidden_size,
        EXPERTS=max(triton.next_power_of_2(logits.shape[1]), 2),
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
        **launch_options(pdl),
    )
    return out, routed


def weighted_sum_of_one(
    x: Tensor, weight: Tensor, routed: Routed, residual: Tensor | None, *, pdl: bool = False
) -> Tensor:
    """`residual`, which is overwritten, or zeros, plus the sum of probability x product over the experts, [1, hidden].

    `x` [top_k, width], `weight` [experts here, hidden, width], `residual` [1, hidden].
    """
    hidden_size, width = weight.shape[1:]
    out = x.new_empty(1, hidden_size) if residual is None else residual
    _down_kernel[(triton.cdiv(hidden_size, _DOWN_ROWS),)](
        x,
        weight,
        routed.probabilities,
        routed.experts,
        out,
        TOP_K=len(x),
        WIDTH=width,
        HIDDEN_SIZE=hidden_size,
        ADD=residual is not None,
        ROWS=_DOWN_ROWS,
        COLUMNS=triton.next_power_of_2(width),
        num_warps=4,
        **launch_options(pdl),
    )
    return out


@triton.jit
def _gated_kernel(
    x_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    probabilities_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    first: tl.tensor,
    num_local: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per expert of the token and ROWS outputs; the first of an expert says which it is."""
    release_next(PDL)
    place, tile = tl.program_id(0), tl.program_id(1)
    row, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    norm_weight = tl.load(norm_weight_ptr + column, mask=column < HIDDEN_SIZE, other=0).to(tl.float32)
    wait_for_previous(PDL)
    index = tl.arange(0, EXPERTS)
    logit = tl.load(logits_ptr + index, mask=index < NUM_EXPERTS, other=-float("inf")).to(tl.float32)
    rank, p = ranked_experts(logit, TOP_K, RENORMALIZE, EXPERTS)
    expert = tl.sum(tl.where(rank == place, index, 0), axis=0) - first
    here = (expert >= 0) & (expert < num_local)
    if tile == 0:
        tl.store(probabilities_ptr + place, tl.sum(tl.where(rank == place, p, 0.0), axis=0))
        tl.store(experts_ptr + place, tl.where(here, expert, -1))
    if here:
        inside = (row < WIDTH)[:, None] & (column < HIDDEN_SIZE)[None, :]
        source = (
            weight_ptr + expert.to(tl.int64) * (2 * WIDTH * HIDDEN_SIZE) + row[:, None] * HIDDEN_SIZE + column[None, :]
        )
        gate_weight = tl.load(source, mask=inside, other=0)  # [ROWS, COLUMNS]
        up_weight = tl.load(source + WIDTH * HIDDEN_SIZE, mask=inside, other=0)
        x = tl.load(x_ptr + column, mask=column < HIDDEN_SIZE, other=0)
        y = x.to(tl.float32)
        y = y * tl.rsqrt(tl.sum(y * y, axis=0) / HIDDEN_SIZE + eps)
        y = (y.to(x.dtype).to(tl.float32) * norm_weight).to(x.dtype).to(tl.float32)  # rounded as by norm.rms_norm
        gate = tl.sum(gate_weight.to(tl.float32) * y[None, :], axis=1)
        up = tl.sum(up_weight.to(tl.float32) * y[None, :], axis=1)
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
    """One program per ROWS outputs. It reduces once, at the end: the loads of all experts are on the way together."""
    release_next(PDL)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (row < HIDDEN_SIZE)[:, None] & (column < WIDTH)[None, :]
    wait_for_previous(PDL)
    products = tl.zeros([ROWS, COLUMNS], tl.float32)
    for place in tl.static_range(TOP_K):
        expert = tl.load(experts_ptr + place)
        source = weight_ptr + tl.maximum(expert, 0).to(tl.int64) * (HIDDEN_SIZE * WIDTH)
        weight = tl.load(source + row[:, None] * WIDTH + column[None, :], mask=inside & (expert >= 0), other=0)
        x = tl.load(x_ptr + place * WIDTH + column, mask=(column < WIDTH) & (expert >= 0), other=0)
        products += weight.to(tl.float32) * (x.to(tl.float32) * tl.load(probabilities_ptr + place))[None, :]
    total = tl.sum(products, axis=1)
    if ADD:
        total += tl.load(out_ptr + row, mask=row < HIDDEN_SIZE, other=0).to(tl.float32)
    tl.store(out_ptr + row, total.to(out_ptr.dtype.element_ty), mask=row < HIDDEN_SIZE)
