"""The experts of one token: as many matrix-vector products as it has, in two launches. Nothing is sorted.

Each program finds its experts in the router's logits, which costs less than a launch: whatever compares logits lies in
one warp, whose reductions are single instructions.
"""

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.launch import launch_options, release_next, wait_for_previous
from worker_svc.kernels.routing import Choice, best_experts, keys_of, take_best

_GATED_BYTES = 8192  # of a row of weights that a warp holds
_FULL_GPU_BYTES, _FULL_GPU_REGISTERS = 4096, 64  # rows so short that registers limit how many programs fit
_DOWN_WARPS = 8
_DOWN_BYTES = 24_576  # of weights that a warp holds
_DOWN_COLUMNS = (64, 256)  # of an expert in a tile, least and most
_DOWN_PROGRAMS = 128  # about so many fill a GPU


def gated_products_of_one(y: Tensor, logits: Tensor, weight: Tensor, choice: Choice, *, pdl: bool = False) -> Tensor:
    """silu(gate) * up for each expert of one token, [top_k, width]; those of other ranks are left undefined.

    `y` [1, hidden], normed, and `logits` [1, num_experts]: see router.router_product_of_one. `weight`
    [experts here, 2 x width, hidden].
    """
    width, hidden_size = weight.shape[1] // 2, weight.shape[2]
    out = y.new_empty(choice.top_k, width)
    columns = triton.next_power_of_2(hidden_size)
    row_bytes = columns * y.element_size()
    _gated_kernel[(width, choice.top_k)](
        y,
        logits,
        weight,
        out,
        choice.first,
        choice.num_local,
        NUM_EXPERTS=logits.shape[1],
        WIDTH=width,
        HIDDEN_SIZE=hidden_size,
        EXPERTS=max(triton.next_power_of_2(logits.shape[1]), 2),
        COLUMNS=columns,
        num_warps=triton.cdiv(row_bytes, _GATED_BYTES),
        maxnreg=_FULL_GPU_REGISTERS if row_bytes <= _FULL_GPU_BYTES else None,
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
    places = triton.next_power_of_2(choice.top_k)
    columns = min(max(width & -width, _DOWN_COLUMNS[0]), _DOWN_COLUMNS[1])
    row_bytes = places * triton.cdiv(width, columns) * columns * x.element_size()
    rows = _power_of_2_below(min(_DOWN_WARPS * _DOWN_BYTES // row_bytes, hidden_size // _DOWN_PROGRAMS))
    matrix = hidden_size * width
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
        MATRICES_ALIGNED=min(matrix & -matrix, 16),
        EXPERTS=max(triton.next_power_of_2(logits.shape[1]), 2),
        PLACES=places,
        ADD=residual is not None,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=_DOWN_WARPS,
        **launch_options(pdl),
    )
    return out


def _power_of_2_below(n: int) -> int:
    """The largest that is not above `n`, at least 1."""
    return 1 << max(n.bit_length() - 1, 0)


@triton.jit
def _gated_kernel(
    y_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first: tl.tensor,
    num_local: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per expert of the token and output. It waits before it releases the next kernel, which so knows the
    logits before it waits itself. Programs of the best expert come first, and look for no other one."""
    wait_for_previous(PDL)
    release_next(PDL)
    row, own, column, index = tl.program_id(0), tl.program_id(1), tl.arange(0, COLUMNS), tl.arange(0, EXPERTS)
    inside = column < HIDDEN_SIZE
    logit = tl.load(logits_ptr + index, mask=index < NUM_EXPERTS, other=-float("inf"), cache_modifier=".cg")
    key, found = keys_of(logit), tl.zeros([1], tl.int32)
    for _ in range(own + 1):
        found, _, key = take_best(key, EXPERTS)
    expert = tl.sum(found, axis=0) - first
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
    MATRICES_ALIGNED: tl.constexpr,
    EXPERTS: tl.constexpr,
    PLACES: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per ROWS outputs. The columns of all experts lie beside each other in a row, so that a warp has one
    expert, of whose inputs it needs few. All weights are on the way together, before it waits."""
    release_next(PDL)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PLACES * COLUMNS)
    own, place, index = column // COLUMNS, tl.arange(0, PLACES), tl.arange(0, EXPERTS)
    column %= COLUMNS
    # A row of logits for each place: each warp compares them by itself.
    logit_at = logits_ptr + index[None, :] + 0 * place[:, None]
    logit = tl.load(logit_at, mask=index[None, :] < NUM_EXPERTS, other=-float("inf"), cache_modifier=".cg")
    chosen, p = best_experts(logit, TOP_K, RENORMALIZE, EXPERTS, PLACES)
    is_own = place[:, None] == place[None, :]
    expert = _of_columns(tl.sum(tl.where(is_own, chosen, 0), axis=1), COLUMNS) - first
    here = tl.max_constancy((expert >= 0) & (expert < num_local) & (own < TOP_K), [COLUMNS])
    matrix = tl.where(here, expert, 0).to(tl.int64) * (HIDDEN_SIZE * WIDTH)
    source = tl.max_contiguous(tl.multiple_of(matrix + column, [MATRICES_ALIGNED]), [COLUMNS])
    weights = ()
    for start in tl.static_range(0, WIDTH, COLUMNS):
        inside = (row < HIDDEN_SIZE)[:, None] & (here & (start + column < WIDTH))[None, :]
        source_tile = weight_ptr + source[None, :] + row[:, None] * WIDTH + start
        weights += (tl.load(source_tile, mask=inside, other=0),)  # type: ignore[assignment]  # a tuple grows
    p = _of_columns(tl.sum(tl.where(is_own, p, 0.0), axis=1), COLUMNS)
    residual = tl.zeros([ROWS], tl.float32)
    if ADD:
        residual = tl.load(out_ptr + row, mask=row < HIDDEN_SIZE, other=0).to(tl.float32)
    wait_for_previous(PDL)
    products = tl.zeros([ROWS, PLACES * COLUMNS], tl.float32)
    for tile in tl.static_range((WIDTH + COLUMNS - 1) // COLUMNS):
        at = tile * COLUMNS + column
        x = tl.load(x_ptr + own * WIDTH + at, mask=here & (at < WIDTH), other=0).to(tl.float32)
        products += weights[tile].to(tl.float32) * (x * p)[None, :]
    total = tl.sum(products, axis=1) + residual
    tl.store(out_ptr + row, total.to(out_ptr.dtype.element_ty), mask=row < HIDDEN_SIZE)


@triton.jit
def _of_columns(of_place: tl.tensor, COLUMNS: tl.constexpr) -> tl.tensor:
    """[PLACES] to [PLACES * COLUMNS]."""
    PLACES: tl.constexpr = of_place.shape[0]
    return tl.reshape(tl.broadcast_to(of_place[:, None], [PLACES, COLUMNS]), [PLACES * COLUMNS])
