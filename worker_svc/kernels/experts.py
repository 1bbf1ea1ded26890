"""Mixture-of-experts layers, from router logits to the sum over a token's experts. Reference: layers.torch_ops."""

import torch
import triton
from torch import Tensor

from worker_svc.kernels.expert_groups import group_pairs
from worker_svc.kernels.expert_products import Tile
from worker_svc.kernels.expert_sum import sum_experts
from worker_svc.kernels.few_tokens_gemm import MOST_TOKENS, gated_products_of_few, weighted_products_of_few
from worker_svc.kernels.grouped_gemm import gated_products, weighted_products
from worker_svc.kernels.routing import Routed


def experts_add(
    x: Tensor,
    routed: Routed,
    gate_up: Tensor,
    down: Tensor,
    residual: Tensor | None,
    *,
    num_experts: int,
    pdl: bool = False,
) -> Tensor:
    """`residual`, which is overwritten, or zeros, plus the sum of probability x expert(x) over each token's experts.

    `x` and `residual` [T, hidden], `gate_up` [experts, 2 x width, hidden], `down` [experts, hidden, width].
    `num_experts`: of all ranks, which share the pairs.
    """
    top_k = routed.experts.shape[1]
    wide, narrow = tiles(routed.experts.numel() / num_experts, x.dtype)
    if len(x) <= MOST_TOKENS:
        activated = gated_products_of_few(x, gate_up, routed, wide, pdl=pdl)
        products = weighted_products_of_few(activated, down, routed, narrow, pdl=pdl)
    else:
        groups = group_pairs(routed.experts, len(gate_up), wide.pairs, pdl=pdl)
        activated = gated_products(x, gate_up, groups, top_k, wide, pdl=pdl)
        products = weighted_products(activated, down, groups, routed, narrow, pdl=pdl)
    out = torch.empty_like(x) if residual is None else residual
    sum_experts(products, routed.experts, out=out, add=residual is not None, pdl=pdl)
    return out


def tiles(pairs_per_expert: float, dtype: torch.dtype) -> tuple[Tile, Tile]:
    """Of gate_up and of down. Both have the same pairs: with few, most experts fit into one block."""
    pairs = min(max(triton.next_power_of_2(int(1.5 * pairs_per_expert) + 1), 16), 128)
    if dtype == torch.float32:  # its products use no tensor cores
        return Tile(pairs, 32, 32, 4, 2), Tile(pairs, 32, 32, 4, 2)
    if pairs == 16:
        return Tile(pairs, 64, 128, 4, 3), Tile(pairs, 128, 128, 4, 3)
    if pairs < 128:
        return Tile(pairs, 64, 64, 4, 4), Tile(pairs, 128, 64, 4, 3)
    return Tile(pairs, 128, 64, 8, 4), Tile(pairs, 128, 64, 4, 3)
