"""The kernels of a mixture-of-experts layer for bench.kernels, at the shape of Qwen3-30B-A3B.

Tokens choose experts at random, each its own. All calls share one layer's weights, 1.2 GB: what a call reads of them
has left the L2 cache before another reads it.
"""

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

from bench.kernel_case import Call, Case
from worker_svc.kernels.expert_gemv import gated_products_of_one, weighted_sum_of_one
from worker_svc.kernels.expert_groups import group_pairs
from worker_svc.kernels.expert_sum import sum_experts
from worker_svc.kernels.experts import experts_add, tiles
from worker_svc.kernels.grouped_gemm import gated_products, weighted_products
from worker_svc.kernels.routing import Choice, Routed, norm_route

MODEL = "30B-A3B"
HIDDEN_SIZE, WIDTH, NUM_EXPERTS, TOP_K = 2048, 768, 128, 8
CHOICE = Choice(TOP_K, True, 0, NUM_EXPERTS)
EPS = 1e-6
_BYTES_OF_EXPERT = 2 * HIDDEN_SIZE * WIDTH  # of one of its three matrices


def expert_cases(batch: int) -> Iterator[Case]:
    """The steps of a layer, and all of them together."""
    touched = NUM_EXPERTS * (1 - (1 - TOP_K / NUM_EXPERTS) ** batch)
    weights = round(touched * _BYTES_OF_EXPERT)
    one = batch == 1
    small = 2 * batch * (NUM_EXPERTS + (1 if one else TOP_K + 2) * HIDDEN_SIZE)
    makers: list[tuple[str, int, Callable[[], Call]]] = [
        ("experts: route", small, _routing_of_one)
        if one
        else ("experts: route, group, sum", small, lambda: _routing(batch)),
        ("experts: gate, up", 2 * weights, _gated_of_one if one else lambda: _gated(batch)),
        ("experts: down", weights, _down_of_one if one else lambda: _down(batch)),
        ("experts: all", 3 * weights, _all_of_one if one else lambda: _all(batch)),
    ]
    for kernel, size, make in makers:
        yield Case(kernel, MODEL, batch, 0, size, make)


@cache
def _weights() -> tuple[Tensor, Tensor]:
    shapes = (NUM_EXPERTS, 2 * WIDTH, HIDDEN_SIZE), (NUM_EXPERTS, HIDDEN_SIZE, WIDTH)
    gate_up, down = (torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(0.02) for shape in shapes)
    return gate_up, down


@cache
def _router() -> tuple[Tensor, Tensor]:
    """The weights of the norm and of the router."""
    router = torch.randn(NUM_EXPERTS, HIDDEN_SIZE, dtype=torch.bfloat16, device="cuda").mul_(0.02)
    return torch.ones(HIDDEN_SIZE, dtype=torch.bfloat16, device="cuda"), router


def _tokens(batch: int) -> Tensor:
    return torch.randn(batch, HIDDEN_SIZE, dtype=torch.bfloat16, device="cuda")


def _route(x: Tensor, pdl: bool = False) -> tuple[Tensor, Routed]:
    norm_weight, router = _router()
    return norm_route(x, norm_weight, EPS, router, _slots(len(x)), CHOICE, pdl=pdl)


@cache
def _slots(batch: int) -> Tensor:
    return torch.arange(batch, dtype=torch.int32, device="cuda")


def _routing(batch: int) -> Call:
    x = _tokens(batch)
    products = torch.randn(batch, TOP_K, HIDDEN_SIZE, dtype=torch.bfloat16, device="cuda")
    block = tiles(batch * TOP_K / NUM_EXPERTS, x.dtype)[0].pairs

    def call(pdl: bool) -> None:
        _, routed = _route(x, pdl)
        group_pairs(routed.experts, NUM_EXPERTS, block, pdl=pdl)
        sum_experts(products, routed.experts, out=x, add=False, pdl=pdl)

    return call


def _gated(batch: int) -> Call:
    x = _tokens(batch)
    tile = tiles(batch * TOP_K / NUM_EXPERTS, x.dtype)[0]
    groups = group_pairs(_route(x)[1].experts, NUM_EXPERTS, tile.pairs)
    return lambda pdl: gated_products(x, _weights()[0], groups, TOP_K, tile, pdl=pdl)


def _down(batch: int) -> Call:
    _, routed = _route(_tokens(batch))
    tile = tiles(batch * TOP_K / NUM_EXPERTS, torch.bfloat16)[1]
    groups = group_pairs(routed.experts, NUM_EXPERTS, tile.pairs)
    activated = torch.randn(batch * TOP_K, WIDTH, dtype=torch.bfloat16, device="cuda")
    return lambda pdl: weighted_products(activated, _weights()[1], groups, routed, tile, pdl=pdl)


def _all(batch: int) -> Call:
    x, residual = _tokens(batch), torch.zeros_like(_tokens(batch))
    return lambda pdl: experts_add(*_route(x, pdl), *_weights(), residual, num_experts=NUM_EXPERTS, pdl=pdl)


def _routing_of_one() -> Call:
    x = _tokens(1)
    return lambda pdl: _route(x, pdl)


def _gated_of_one() -> Call:
    x, routed = _route(_tokens(1))
    return lambda pdl: gated_products_of_one(x, _weights()[0], routed, pdl=pdl)


def _down_of_one() -> Call:
    x, routed = _route(_tokens(1))
    activated = gated_products_of_one(x, _weights()[0], routed)
    return lambda pdl: weighted_sum_of_one(activated, _weights()[1], routed, x, pdl=pdl)


def _all_of_one() -> Call:
    x, residual = _tokens(1), torch.zeros_like(_tokens(1))

    def call(pdl: bool) -> None:
        y, routed = _route(x, pdl)
        activated = gated_products_of_one(y, _weights()[0], routed, pdl=pdl)
        weighted_sum_of_one(activated, _weights()[1], routed, residual, pdl=pdl)

    return call
