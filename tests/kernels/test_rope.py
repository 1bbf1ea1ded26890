"""Queries and keys are normed and turned by their position's angles; K/V land where the slot mapping says."""

import pytest
import torch
from torch import Tensor

from shared.errors import StartupError
from tests.kernels import COMPILED, DEVICE, DTYPES, assert_close, ints, poisoned, randn
from worker_svc.kernels.rope import QKNorm, rotate_and_store

EPS = 1e-6
HEADS = [(2, 1, 32), (6, 3, 64), (16, 8, 128)] + [(32, 8, 128), (8, 1, 128)] * COMPILED  # query, K/V, head_dim
POSITIONS = [0, 5, 99, 5]
SLOTS = [3, 40, -1, 17]


def angles(head_dim: int) -> Tensor:
    """[100, head_dim / 2]"""
    frequencies = 10_000.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return torch.arange(100, dtype=torch.float64)[:, None] * frequencies


def turned(x: Tensor, weight: Tensor | None) -> Tensor:
    """[tokens, heads, head_dim] in float64, as complex numbers times e^(i angle)."""
    x = x.double().cpu()
    if weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double().cpu()
    first, second = x.chunk(2, dim=-1)
    turn = torch.polar(torch.ones(()).double(), angles(x.shape[-1])[POSITIONS])[:, None]
    product = torch.complex(first, second) * turn
    return torch.cat((product.real, product.imag), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_rotate_and_store(heads: int, kv_heads: int, head_dim: int, with_norm: bool, dtype: torch.dtype) -> None:
    packed = randn(4, heads + 2 * kv_heads, head_dim, dtype=dtype)
    query, key, value = packed.clone().split((heads, kv_heads, kv_heads), dim=1)
    norm = None
    if with_norm:
        norm = QKNorm(randn(head_dim, dtype=dtype, seed=1), randn(head_dim, dtype=dtype, seed=2), EPS)
    caches = [poisoned(3, 16, kv_heads, head_dim, dtype=dtype) for _ in range(2)]
    cos, sin = (f(angles(head_dim)).float().to(DEVICE) for f in (torch.cos, torch.sin))
    rotate_and_store(packed.flatten(1), ints(POSITIONS), ints(SLOTS), cos, sin, norm, caches[0], caches[1])
    assert_close(packed[:, :heads], turned(query, norm and norm.query_weight))
    keys, values = (cache.flatten(0, 1) for cache in caches)
    stored, tokens = [3, 40, 17], [0, 1, 3]
    assert_close(keys[stored], turned(key, norm and norm.key_weight)[tokens])
    torch.testing.assert_close(values[stored], value[tokens], rtol=0, atol=0)
    others = [slot for slot in range(48) if slot not in stored]
    assert keys[others].isnan().all() and values[others].isnan().all()


def test_a_head_size_without_a_kernel_is_refused() -> None:
    cache = randn(1, 16, 1, 96)
    table = randn(8, 48)
    with pytest.raises(StartupError, match="head_dim 96"):
        rotate_and_store(randn(1, 288), ints([0]), ints([0]), table, table, None, cache, cache)
