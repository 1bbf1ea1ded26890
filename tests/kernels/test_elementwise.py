"""Norms and the activation equal their formulas in float64."""

import pytest
import torch
from torch import Tensor

from tests.kernels import COMPILED, DTYPES, assert_close, poisoned, randn
from worker_svc.kernels.activation import silu_and_mul
from worker_svc.kernels.norm import rms_norm

EPS = 1e-6
SHAPES = [(1, 64), (3, 96), (5, 1024)] + [(1, 4096), (256, 1024), (64, 4096), (7, 5120)] * COMPILED


def norm_of(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[1], dtype=dtype, seed=1)
    out = poisoned(*shape, dtype=dtype)
    rms_norm(x, weight, EPS, out=out)
    assert_close(out, norm_of(x, weight))


def test_the_output_may_be_the_input() -> None:
    x, weight = randn(4, 96), randn(96, seed=2)
    expected = norm_of(x, weight)
    rms_norm(x, weight, EPS, out=x)
    assert_close(x, expected)


def test_rows_may_be_strided() -> None:
    wide = randn(3, 256)
    out = poisoned(3, 192, dtype=torch.float32)
    rms_norm(wide[:, :64], torch.ones_like(wide[0, :64]), EPS, out=out[:, :64])
    assert_close(out[:, :64], norm_of(wide[:, :64], torch.ones(64, device=wide.device)))
    assert out[:, 64:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 32), (3, 1500)] + [(256, 3072), (8, 12288)] * COMPILED)
def test_silu_and_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = 3 * randn(shape[0], 2 * shape[1], dtype=dtype)
    out = poisoned(*shape, dtype=dtype)
    silu_and_mul(gate_up, out=out)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(out, gate / (1 + (-gate).exp()) * up)
