"""Which experts compute which token, and how much each counts. Reference: layers.torch_ops.route."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.launch import launch_options, release_next, row_stride, wait_for_previous


@dataclass(frozen=True, slots=True)
class Routed:
    """The experts of T tokens, best first."""

    probabilities: Tensor
    """[T, top_k] float32"""
    experts: Tensor
    """[T, top_k] int32: index among the experts of this rank; -1 is one of another rank, or padding's."""


def route(
    logits: Tensor,
    slot_mapping: Tensor,
    *,
    top_k: int,
    renormalize: bool,
    first: int,
    num_local: int,
    pdl: bool = False,
) -> Routed:
    """The top_k of softmax(logits); among equals the first ones. `logits` [T, num_experts], `slot_mapping` [T].

    This rank has the experts [first, first + num_local). Tokens of slot -1 are padding.
    """
    tokens, num_experts = logits.shape
    routed = Routed(
        torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device),
        torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device),
    )
    _route_kernel[(tokens,)](
        logits,
        slot_mapping,
        routed.probabilities,
        routed.experts,
        row_stride(logits),
        first,
        num_local,
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        RENORMALIZE=renormalize,
        BLOCK=triton.next_power_of_2(num_experts),
        num_warps=4,
        **launch_options(pdl),
    )
    return routed


@triton.jit
def ranked_experts(
    logits_ptr: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Rank and probability of each expert of one token, [BLOCK]. Ranks are a permutation, whatever the logits are."""
    expert = tl.arange(0, BLOCK)
    logit = tl.load(logits_ptr + expert, mask=expert < NUM_EXPERTS, other=-float("inf")).to(tl.float32)
    key = tl.where(logit == logit, logit, -float("inf"))  # NaN has no order
    above = key[None, :] > key[:, None]
    equal_before = (key[None, :] == key[:, None]) & (expert[None, :] < expert[:, None])
    rank = tl.sum((above | equal_before).to(tl.int32), axis=1)
    p = tl.exp(logit - tl.max(key, axis=0))
    chosen = tl.where(rank < TOP_K, p, 0.0)
    return rank, p / (tl.sum(chosen, axis=0) if RENORMALIZE else tl.sum(p, axis=0))


@triton.jit
def _route_kernel(
    logits_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    probabilities_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    logits_stride: tl.tensor,
    first: tl.tensor,
    num_local: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per token."""
    release_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    rank, p = ranked_experts(logits_ptr + token * logits_stride, NUM_EXPERTS, TOP_K, RENORMALIZE, BLOCK)
    local = tl.arange(0, BLOCK) - first
    here = (local >= 0) & (local < num_local) & (tl.load(slot_mapping_ptr + token) >= 0)
    chosen = rank < TOP_K
    tl.store(probabilities_ptr + token * TOP_K + rank, p, mask=chosen)
    tl.store(experts_ptr + token * TOP_K + rank, tl.where(here, local, -1), mask=chosen)
