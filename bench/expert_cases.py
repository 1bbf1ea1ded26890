"""The kernels of a mixture-of-experts layer for bench.kernels, at the shapes of Qwen3-30B-A3B and Qwen3-235B-A22B.

Tokens choose experts at random, each its own. All calls share one layer's weights, 1.2 or 4.8 GB: what a call reads of
them has left the L2 cache before another reads it.
"""

from collections.abc import Callable, Iterator
from functools import cache, cached_property, partial

import torch
from torch import Tensor

from bench.kernel_case import Call, Case
from worker_svc.kernels.expert_gemv import gated_products_of_one, weighted_sum_of_one
from worker_svc.kernels.expert_groups import Groups, group_pairs
from worker_svc.kernels.expert_products import Tile
from worker_svc.kernels.expert_sum import sum_experts
from worker_svc.kernels.experts import experts_add, tiles
from worker_svc.kernels.few_tokens_gemm import MOST_TOKENS, gated_products_of_few, weighted_products_of_few
from worker_svc.kernels.grouped_gemm import gated_products, weighted_products
from worker_svc.kernels.routing import Choice, Routed, norm_route

NUM_EXPERTS, TOP_K = 128, 8
CHOICE = Choice(TOP_K, True, 0, NUM_EXPERTS)
EPS = 1e-6


class Layer:
    """One layer's weights, made when they are first needed, and calls of its kernels."""

    def __init__(self, model: str, hidden_size: int, width: int) -> None:
        self._model, self._hidden_size, self._width = model, hidden_size, width

    def cases(self, batch: int) -> Iterator[Case]:
        """Of one token those after the router's product."""
        matrix = 2 * self._hidden_size * self._width  # bytes of one of an expert's three
        touched = NUM_EXPERTS * (1 - (1 - TOP_K / NUM_EXPERTS) ** batch)
        makers: tuple[Callable[[int], Call], ...] = (self._gated_of_one, self._down_of_one, self._all_of_one)
        if batch > 1:
            makers = (self._gated, self._down, self._all)
            small = 2 * batch * (NUM_EXPERTS + (TOP_K + 2) * self._hidden_size)
            yield Case("experts: route, group, sum", self._model, batch, 0, small, partial(self._routing, batch))
        for kernel, matrices, make in zip(("gate, up", "down", "all"), (2, 1, 3), makers, strict=True):
            size = round(matrices * touched * matrix)
            yield Case(f"experts: {kernel}", self._model, batch, 0, size, partial(make, batch))

    @cached_property
    def _gate_up(self) -> Tensor:
        return self._random(NUM_EXPERTS, 2 * self._width, self._hidden_size)

    @cached_property
    def _down_weight(self) -> Tensor:
        return self._random(NUM_EXPERTS, self._hidden_size, self._width)

    @cached_property
    def _router(self) -> tuple[Tensor, Tensor]:
        """The weights of the norm and of the router."""
        return torch.ones_like(self._tokens(1)[0]), self._random(NUM_EXPERTS, self._hidden_size)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(0.02)

    def _tokens(self, batch: int) -> Tensor:
        return torch.randn(batch, self._hidden_size, dtype=torch.bfloat16, device="cuda")

    def _route(self, x: Tensor, slots: Tensor, pdl: bool = False) -> tuple[Tensor, Routed]:
        norm_weight, router = self._router
        return norm_route(x, norm_weight, EPS, router, slots, CHOICE, pdl=pdl)

    def _routed(self, batch: int) -> tuple[Tensor, Routed, Groups, tuple[Tile, Tile]]:
        """Normed tokens, and what products of them with the experts' weights take."""
        x, routed = self._route(self._tokens(batch), _slots(batch))
        chosen = tiles(batch * TOP_K / NUM_EXPERTS, x.dtype)
        return x, routed, group_pairs(routed.experts, NUM_EXPERTS, chosen[0].pairs), chosen

    def _routing(self, batch: int) -> Call:
        x, slots = self._tokens(batch), _slots(batch)
        products = torch.randn(batch, TOP_K, self._hidden_size, dtype=torch.bfloat16, device="cuda")

        def call(pdl: bool) -> None:
            y, routed = self._route(x, slots, pdl)
            if batch > MOST_TOKENS:
                tile = tiles(routed.experts.numel() / NUM_EXPERTS, y.dtype)[0]
                group_pairs(routed.experts, NUM_EXPERTS, tile.pairs, pdl=pdl)
            sum_experts(products, routed.experts, out=y, add=False, pdl=pdl)

        return call

    def _gated(self, batch: int) -> Call:
        x, routed, groups, (tile, _) = self._routed(batch)
        if batch <= MOST_TOKENS:
            return lambda pdl: gated_products_of_few(x, self._gate_up, routed, tile, pdl=pdl)
        return lambda pdl: gated_products(x, self._gate_up, groups, TOP_K, tile, pdl=pdl)

    def _down(self, batch: int) -> Call:
        _, routed, groups, (_, tile) = self._routed(batch)
        activated = torch.randn(batch, TOP_K, self._width, dtype=torch.bfloat16, device="cuda")
        if batch <= MOST_TOKENS:
            return lambda pdl: weighted_products_of_few(activated, self._down_weight, routed, tile, pdl=pdl)
        activated = activated.flatten(0, 1)
        return lambda pdl: weighted_products(activated, self._down_weight, groups, routed, tile, pdl=pdl)

    def _all(self, batch: int) -> Call:
        x, slots, weights = self._tokens(batch), _slots(batch), (self._gate_up, self._down_weight)
        residual = torch.zeros_like(x)
        return lambda pdl: experts_add(
            *self._route(x, slots, pdl), *weights, residual, num_experts=NUM_EXPERTS, pdl=pdl
        )

    def _gated_of_one(self, _: int) -> Call:
        x, logits = self._tokens(1), self._tokens(1)[:, :NUM_EXPERTS]
        return lambda pdl: gated_products_of_one(x, logits, self._gate_up, CHOICE, pdl=pdl)

    def _down_of_one(self, _: int) -> Call:
        x, logits = self._tokens(1), self._tokens(1)[:, :NUM_EXPERTS]
        activated = gated_products_of_one(x, logits, self._gate_up, CHOICE)
        return lambda pdl: weighted_sum_of_one(activated, self._down_weight, logits, CHOICE, x, pdl=pdl)

    def _all_of_one(self, _: int) -> Call:
        x, logits = self._tokens(1), self._tokens(1)[:, :NUM_EXPERTS]
        residual = torch.zeros_like(x)

        def call(pdl: bool) -> None:
            activated = gated_products_of_one(x, logits, self._gate_up, CHOICE, pdl=pdl)
            weighted_sum_of_one(activated, self._down_weight, logits, CHOICE, residual, pdl=pdl)

        return call


_LAYERS = Layer("30B-A3B", 2048, 768), Layer("235B-A22B", 4096, 1536)


def expert_cases(batch: int) -> Iterator[Case]:
    """The steps of a layer, and all of them together."""
    for layer in _LAYERS:
        yield from layer.cases(batch)


@cache
def _slots(batch: int) -> Tensor:
    return torch.arange(batch, dtype=torch.int32, device="cuda")
