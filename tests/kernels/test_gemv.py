"""A matrix times one vector, against float64."""

import pytest
import torch

from tests.kernels import DTYPES, assert_close, randn
from worker_svc.kernels.gemv import gemv


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 40), (96, 4099), (4096, 24), (5000, 9)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_equal_to_float64(dtype: torch.dtype, inputs: int, outputs: int, has_bias: bool) -> None:
    """Also where neither dimension is a multiple of a tile, and where the inputs take several."""
    x, weight = randn(1, inputs, dtype=dtype), randn(outputs, inputs, dtype=dtype, seed=1)
    bias = randn(outputs, dtype=dtype, seed=2) if has_bias else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_close(gemv(x, weight, bias), expected)
