"""Which experts compute which token, and how much each counts. Reference: layers.torch_ops.route."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.launch import launch_options, release_next, row_stride, wait_for_previous
from worker_svc.kernels.router import router_products

_BLOCK = 1024  # columns that a program norms at a time
_PARTS = 16  # of the router's product, that it adds at a time


@dataclass(frozen=True, slots=True)
class Choice:
    """How experts are chosen: the top_k of softmax(logits), among equals the first ones."""

    top_k: int
    renormalize: bool
    """Whether their probabilities are scaled to a sum of 1."""
    first: int
    """This rank has the experts [first, first + num_local)."""
    num_local: int


@dataclass(frozen=True, slots=True)
class Routed:
    """The experts of T tokens, best first."""

    probabilities: Tensor
    """[T, top_k] float32"""
    experts: Tensor
    """[T, top_k] int32: index among the experts of this rank; -1 is one of another rank, or padding's."""


def empty_routed(tokens: int, top_k: int, device: torch.device) -> Routed:
    """To be written by a kernel."""
    return Routed(
        torch.empty(tokens, top_k, dtype=torch.float32, device=device),
        torch.empty(tokens, top_k, dtype=torch.int32, device=device),
    )


def norm_route(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    router: Tensor,
    slot_mapping: Tensor,
    choice: Choice,
    *,
    pdl: bool = False,
) -> tuple[Tensor, Routed]:
    """y = rms_norm(x), and the experts of y @ router^T. `x` [T, hidden], `router` [num_experts, hidden].

    `slot_mapping` [T]: a token of slot -1 is padding, and has no expert.
    """
    products, squares = router_products(x, norm_weight, router, pdl=pdl)
    (parts, tokens, num_experts), hidden_size = products.shape, x.shape[1]
    y, routed = torch.empty_like(x), empty_routed(tokens, choice.top_k, x.device)
    _route_kernel[(tokens,)](
        products,
        squares,
        x,
        norm_weight,
        slot_mapping,
        routed.probabilities,
        routed.experts,
        y,
        eps,
        parts,
        tokens,
        row_stride(x),
        choice.first,
        choice.num_local,
        PARTS=_PARTS,
        HIDDEN_SIZE=hidden_size,
        NUM_EXPERTS=num_experts,
        TOP_K=choice.top_k,
        RENORMALIZE=choice.renormalize,
        EXPERTS=max(triton.next_power_of_2(num_experts), 2),
        PLACES=triton.next_power_of_2(choice.top_k),
        BLOCK=_BLOCK,
        num_warps=1,  # so that each of many small reductions stays in a warp
        **launch_options(pdl),
    )
    return y, routed


@triton.jit(do_not_specialize=["parts", "tokens"])
def _route_kernel(
    products_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    x_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    probabilities_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    y_ptr: tl.tensor,
    eps: tl.tensor,
    parts: tl.tensor,
    tokens: tl.tensor,
    x_stride: tl.tensor,
    first: tl.tensor,
    num_local: tl.tensor,
    PARTS: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per token."""
    release_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, EXPERTS), tl.arange(0, PLACES)
    wait_for_previous(PDL)
    slot = tl.load(slot_mapping_ptr + token)
    logit = tl.where(expert < NUM_EXPERTS, 0.0, -float("inf"))
    square = 0.0
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        row = part * tokens.to(tl.int64) + token
        at = products_ptr + row[:, None] * NUM_EXPERTS + expert[None, :]
        here = (part < parts)[:, None] & (expert < NUM_EXPERTS)[None, :]
        logit += tl.sum(tl.load(at, mask=here, other=0), axis=0)
        square += tl.sum(tl.load(squares_ptr + row, mask=part < parts, other=0), axis=0)
    factor = tl.rsqrt(square / HIDDEN_SIZE + eps)
    for start in tl.static_range(0, HIDDEN_SIZE, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < HIDDEN_SIZE
        weight = tl.load(norm_weight_ptr + column, mask=inside, other=0).to(tl.float32)
        x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0)
        y = (x.to(tl.float32) * factor).to(x.dtype).to(tl.float32) * weight  # rounded between, as by norm.rms_norm
        tl.store(y_ptr + token * HIDDEN_SIZE + column, y.to(x.dtype), mask=inside)
    chosen, p = best_experts(logit * factor, TOP_K, RENORMALIZE, EXPERTS, PLACES)
    local = chosen - first
    here = (local >= 0) & (local < num_local) & (slot >= 0)
    tl.store(probabilities_ptr + token * TOP_K + place, p, mask=place < TOP_K)
    tl.store(experts_ptr + token * TOP_K + place, tl.where(here, local, -1), mask=place < TOP_K)


@triton.jit
def best_experts(
    logit: tl.tensor, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, PLACES: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The TOP_K best experts and their probabilities, [..., PLACES]. They differ, whatever the logits are.

    `logit` [..., EXPERTS] float32, -infinity past the last expert.
    """
    place = tl.arange(0, PLACES)
    key = keys_of(logit)
    chosen, best = tl.zeros([PLACES], tl.int32), tl.zeros([PLACES], tl.int32)
    for k in tl.static_range(TOP_K):
        index, largest, key = take_best(key, EXPERTS)
        chosen = tl.where(place == k, index, chosen)
        best = tl.where(place == k, largest, best)
    score = tl.where(place < TOP_K, _ordered(best).to(tl.float32, bitcast=True), -float("inf"))
    peak = tl.max(score, axis=-1, keep_dims=True)
    p = tl.exp(score - peak)
    total = tl.sum(p, axis=-1, keep_dims=True)
    if not RENORMALIZE:
        total = tl.sum(tl.exp(logit - peak), axis=-1, keep_dims=True)
    return chosen, p / total


@triton.jit
def keys_of(logit: tl.tensor) -> tl.tensor:
    """Integers in the order of the logits. NaN has none: it comes last."""
    return _ordered(tl.where(logit == logit, logit, -float("inf")).to(tl.int32, bitcast=True))


@triton.jit
def take_best(key: tl.tensor, EXPERTS: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Of `key` [..., EXPERTS] the first of the largest: its index and value, [..., 1], and the keys without it."""
    expert = tl.arange(0, EXPERTS)
    largest = tl.max(key, axis=-1, keep_dims=True)
    index = tl.min(tl.where(key == largest, expert, EXPERTS), axis=-1, keep_dims=True)
    return index, largest, tl.where(expert == index, -(2**31), key)


@triton.jit
def _ordered(bits: tl.tensor) -> tl.tensor:
    """Integers in the order of the float32 that have these bits, and back: a warp compares integers in one step."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
