"""Routing, grouping and the products of experts, against float64, wherever the router sends tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import COMPILED, DEVICE, DTYPES, assert_close, ints, poisoned, randn
from worker_svc.kernels.expert_gemv import gated_products_of_one, weighted_sum_of_one
from worker_svc.kernels.expert_groups import group_pairs, most_blocks
from worker_svc.kernels.expert_products import Tile
from worker_svc.kernels.expert_sum import sum_experts
from worker_svc.kernels.experts import experts_add, tiles
from worker_svc.kernels.grouped_gemm import gated_products, weighted_products
from worker_svc.kernels.router import router_product_of_one
from worker_svc.kernels.routing import Choice, Routed, norm_route

EPS = 1e-6
SMALL_TILE = Tile(pairs=16, outputs=32, inputs=32, num_warps=4, num_stages=2)


def norm_of(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def route_logits(logits: Tensor, top_k: int, **part: Any) -> Routed:
    """Of tokens whose logits, up to a factor, are given: each hidden value is the score of one expert."""
    num_experts = logits.shape[1]
    slots = part.pop("slots", torch.arange(len(logits), dtype=torch.int32, device=DEVICE))
    choice = Choice(**{"top_k": top_k, "renormalize": False, "first": 0, "num_local": num_experts, **part})
    ones, router = torch.ones(num_experts, device=DEVICE), torch.eye(num_experts, device=DEVICE)
    return norm_route(logits, ones, EPS, router, slots, choice)[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "hidden", "num_experts", "top_k", "renormalize"),
    [(1, 64, 128, 8, True), (21, 300, 6, 2, False), (3, 640, 60, 4, True), (257, 96, 4, 4, False)]
    + [(n, 2048, 128, 8, renormalize) for n in (2, 256, 3000) for renormalize in (True, False)] * COMPILED,
)
def test_norm_route(
    tokens: int, hidden: int, num_experts: int, top_k: int, dtype: torch.dtype, renormalize: bool
) -> None:
    """The norm as by norm.rms_norm; probabilities are those of the experts that are named, and none is better."""
    x, weight = randn(tokens, hidden, dtype=dtype), randn(hidden, dtype=dtype, seed=1)
    router = 2 * randn(num_experts, hidden, dtype=dtype, seed=2) / hidden**0.5
    slots = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
    y, routed = norm_route(x, weight, EPS, router, slots, Choice(top_k, renormalize, 0, num_experts))
    exact = norm_of(x, weight)
    assert_close(y, exact)
    p = (exact @ router.double().T).softmax(-1)
    best, named = p.topk(top_k).values, p.gather(1, routed.experts.long())
    assert all(len(set(row)) == top_k for row in routed.experts.tolist())
    factor = best.sum(-1, keepdim=True) if renormalize else 1.0
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-4
    for expected in (best, named):
        torch.testing.assert_close(routed.probabilities.double(), expected / factor, rtol=tolerance, atol=0)


def test_route_takes_the_first_of_equals() -> None:
    logits = torch.zeros(2, 8, device=DEVICE)
    logits[1, [6, 3]] = 1.0
    routed = route_logits(logits, 3)
    assert routed.experts.tolist() == [[0, 1, 2], [3, 6, 0]]
    torch.testing.assert_close(routed.probabilities[0], torch.full((3,), 1 / 8, device=DEVICE))


def test_route_of_a_poisoned_token_stays_inside() -> None:
    """Its probabilities are NaN, which shows in the end; its experts are experts; the other tokens don't notice."""
    logits = randn(4, 8)
    expected = route_logits(logits, 3)
    logits[1, 5], logits[2] = torch.nan, torch.nan
    routed = route_logits(logits, 3)
    for token in (1, 2):
        assert routed.probabilities[token].isnan().all()
        assert len(set(routed.experts[token].tolist())) == 3 and set(routed.experts[token].tolist()) <= set(range(8))
    for token in (0, 3):
        assert torch.equal(routed.experts[token], expected.experts[token])
        assert torch.equal(routed.probabilities[token], expected.probabilities[token])


def test_route_leaves_out_padding_and_the_experts_of_other_ranks() -> None:
    logits = randn(6, 8)
    whole = route_logits(logits, 3).experts
    slots = ints([0, -1, 64, -1, 5, 6])
    part = route_logits(logits, 3, slots=slots, first=2, num_local=4).experts
    inside = (whole >= 2) & (whole < 6) & (slots >= 0)[:, None]
    assert torch.equal(part, torch.where(inside, whole - 2, -1))
    assert (part >= 0).any() and (part[slots >= 0] < 0).any()


def routings(tokens: int, num_experts: int, top_k: int) -> dict[str, list[list[int]]]:
    """Experts of each token: whatever a router may come up with. A token's experts differ."""
    generator = torch.Generator().manual_seed(tokens)
    uniform = torch.rand(tokens, num_experts, generator=generator)
    skewed = uniform / torch.arange(1, num_experts + 1) ** 2
    made = {
        "uniform": uniform.topk(top_k).indices.tolist(),
        "skewed": skewed.topk(top_k).indices.tolist(),
        "all to the same": [list(range(top_k))] * tokens,
        "all to the last": [list(range(num_experts - 1, num_experts - 1 - top_k, -1))] * tokens,
    }
    made["some left out"] = [
        [-1 if (i + j) % 3 == 0 else e for j, e in enumerate(row)] for i, row in enumerate(made["uniform"])
    ]
    made["all left out"] = [[-1] * top_k] * tokens
    return made


@pytest.mark.parametrize("kind", routings(1, 2, 1))
@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k", "block"),
    [(1, 32, 8, 16), (3, 1, 1, 16), (7, 6, 2, 16), (200, 5, 3, 16), (1500, 3, 3, 64), (2100, 5, 2, 64)]
    + [(1, 128, 8, 16)] * COMPILED,
)
def test_group_pairs(tokens: int, num_experts: int, top_k: int, block: int, kind: str) -> None:
    """Each pair is in exactly one block, of its expert, and the blocks fit into what was set aside."""
    experts = ints(routings(tokens, num_experts, top_k)[kind])
    groups = group_pairs(experts, num_experts, block)
    count, flat, seen = int(groups.num_blocks), experts.flatten().tolist(), []
    assert count <= groups.blocks.shape[1] == most_blocks(tokens * top_k, num_experts, block)
    for expert, first, size in groups.blocks[:, :count].T.tolist():
        assert 1 <= size <= block
        pairs = groups.pairs[first : first + size].tolist()
        assert [flat[pair] for pair in pairs] == [expert] * size
        seen += pairs
    assert sorted(seen) == [pair for pair, expert in enumerate(flat) if expert >= 0]


def test_the_most_blocks_can_be_needed() -> None:
    """One expert has all but the pairs that give each other one a block of its own."""
    experts = ints([[0]] * 33 + [[expert] for expert in range(1, 5)])
    assert int(group_pairs(experts, 5, 16).num_blocks) == most_blocks(37, 5, 16) == 7


class Layer:
    """Random experts and tokens, and their answer in float64."""

    def __init__(self, tokens: int, experts: list[list[int]], sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
        num_experts, hidden, width = sizes
        top_k = len(experts[0])
        self.x, self.residual = randn(tokens, hidden, dtype=dtype), randn(tokens, hidden, dtype=dtype, seed=1)
        self.gate_up = randn(num_experts, 2 * width, hidden, dtype=dtype, seed=2) / hidden**0.5
        self.down = randn(num_experts, hidden, width, dtype=dtype, seed=3) / width**0.5
        self.routed = Routed(randn(tokens, top_k, seed=4).abs(), ints(experts))

    def expert(self, index: int, x: Tensor) -> Tensor:
        gate, up = (self.gate_up[index].double() @ x.double()).chunk(2)
        return gate / (1 + (-gate).exp()) * up

    def expected(self) -> Tensor:
        total = torch.zeros(self.x.shape, dtype=torch.float64, device=DEVICE)
        for token, chosen in enumerate(self.routed.experts.tolist()):
            for place, index in enumerate(chosen):
                if index >= 0:
                    product = self.down[index].double() @ self.expert(index, self.x[token])
                    total[token] += self.routed.probabilities[token, place].double() * product
        return total


SIZES = [(6, 64, 48), (5, 104, 40)] + [(128, 2048, 768), (128, 2048, 96)] * COMPILED


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, dtype) for kind in routings(1, 2, 1) for dtype in DTYPES[: 2 if COMPILED or kind == "uniform" else 1]],
)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("tokens", [9, 21] + [2, 16, 64, 300] * COMPILED)
def test_experts_add(tokens: int, sizes: tuple[int, int, int], kind: str, dtype: torch.dtype) -> None:
    layer = Layer(tokens, routings(tokens, sizes[0], 2)[kind], sizes, dtype)
    expected = layer.expected()
    without = experts_add(layer.x, layer.routed, layer.gate_up, layer.down, None, num_experts=sizes[0])
    assert_close(without, expected, roundings=3)
    residual = layer.residual.clone()
    total = experts_add(layer.x, layer.routed, layer.gate_up, layer.down, residual, num_experts=sizes[0])
    assert total.data_ptr() == residual.data_ptr()
    assert_close(total, expected + layer.residual.double(), roundings=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "mean"), [(9, 1), (9, 12), (9, 40), (9, 100), (120, 100)])
def test_products_with_every_tile(tokens: int, mean: int, dtype: torch.dtype) -> None:
    """Of each product alone, also where a tile has more pairs, outputs and inputs than there are, or half the pairs."""
    layer = Layer(tokens, routings(tokens, 3, 2)["uniform"], (3, 80, 40), dtype)
    wide, narrow = tiles(mean, dtype)
    groups = group_pairs(layer.routed.experts, 3, wide.pairs)
    pairs, experts = groups.pairs.tolist(), layer.routed.experts.flatten().tolist()
    activated = gated_products(layer.x, layer.gate_up, groups, 2, wide)
    exact = torch.stack([layer.expert(experts[pair], layer.x[pair // 2]) for pair in pairs])
    assert_close(activated, exact)
    products = weighted_products(activated, layer.down, groups, layer.routed, narrow)
    factors = layer.routed.probabilities.double()
    for pair, value in zip(pairs, activated.double(), strict=True):
        expected = factors[pair // 2, pair % 2] * (layer.down[experts[pair]].double() @ value)
        assert_close(products[pair // 2, pair % 2], expected)


def test_a_token_does_not_depend_on_the_others() -> None:
    """Bit for bit, wherever it stands in its block."""
    layer = Layer(6, routings(6, 2, 2)["uniform"], (2, 64, 48), torch.float32)
    groups = group_pairs(layer.routed.experts, 2, 16)
    together = gated_products(layer.x, layer.gate_up, groups, 2, SMALL_TILE)
    for place, pair in enumerate(groups.pairs.tolist()):
        token = pair // 2
        one = group_pairs(layer.routed.experts[token : token + 1], 2, 16)
        alone = gated_products(layer.x[token : token + 1], layer.gate_up, one, 2, SMALL_TILE)
        assert torch.equal(alone[one.pairs.tolist().index(pair % 2)], together[place])


def test_a_sum_skips_what_was_not_computed() -> None:
    products = randn(3, 2, 70)
    products[0, 1] = products[2] = torch.nan
    experts = ints([[4, -1], [0, 1], [-1, -1]])
    out = poisoned(3, 70, dtype=torch.float32)
    sum_experts(products, experts, out=out, add=False)
    expected = torch.stack([products[0, 0], products[1].sum(0), torch.zeros(70, device=DEVICE)])
    torch.testing.assert_close(out, expected)
    sum_experts(products, experts, out=out, add=True)
    torch.testing.assert_close(out, 2 * expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "num_experts"), [(64, 128), (300, 6)] + [(2048, 128), (4096, 128)] * COMPILED)
def test_router_product_of_one(hidden: int, num_experts: int, dtype: torch.dtype) -> None:
    x, weight = randn(1, hidden, dtype=dtype), randn(hidden, dtype=dtype, seed=1)
    router = randn(num_experts, hidden, dtype=dtype, seed=2)
    y, logits = router_product_of_one(x, weight, EPS, router)
    assert_close(y, norm_of(x, weight))
    assert_close(logits, y.double() @ router.double().T)


@pytest.mark.parametrize(
    ("sizes", "first", "num_local", "renormalize", "dtype"),
    [
        (sizes, *part, renormalize, dtype)
        for sizes in SIZES
        for part in ((0, None), (2, 2))
        for renormalize in (True, False)
        for dtype in DTYPES[: 2 if COMPILED or renormalize else 1]
    ]
    + [((5, 259, 40), 2, 2, True, torch.float32)],
)
def test_one_token(
    sizes: tuple[int, int, int], first: int, num_local: int | None, renormalize: bool, dtype: torch.dtype
) -> None:
    """On a rank that has all experts and on one that has two; also where the last program has fewer outputs."""
    num_experts, hidden, _ = sizes
    layer = Layer(1, [[0, 1, 2]], sizes, dtype)
    logits = randn(1, num_experts, seed=5)
    gate_up, down = (weight[first:][:num_local] for weight in (layer.gate_up, layer.down))
    choice = Choice(3, renormalize, first, len(gate_up))
    activated = gated_products_of_one(layer.x, logits, gate_up, choice)
    best = logits.double().softmax(-1).sort(descending=True)
    factors = best.values[0, :3] / (best.values[0, :3].sum() if renormalize else 1)
    expected = torch.zeros(1, hidden, dtype=torch.float64, device=DEVICE)
    for place, index in enumerate(best.indices[0, :3].tolist()):
        if first <= index < first + len(gate_up):
            exact = layer.expert(index, layer.x[0])
            assert_close(activated[place], exact)
            expected += factors[place] * (layer.down[index].double() @ exact)
        else:
            activated[place] = torch.nan
    assert_close(weighted_sum_of_one(activated, down, logits, choice, None), expected, roundings=3)
    total = weighted_sum_of_one(activated, down, logits, choice, layer.residual.clone())
    assert_close(total, expected + layer.residual.double(), roundings=3)
