"""The products of few rows and of many, with all that they may carry, equal their formulas in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.kernels import COMPILED, DTYPES, assert_close, poisoned, randn
from worker_svc.kernels.fused_linear import fused_linear, is_faster
from worker_svc.kernels.gemv import gemv
from worker_svc.kernels.tiled_linear import is_faster_in_tiles, tiled_linear
from worker_svc.layers.ops import Norm
from worker_svc.layers.triton_ops import TritonOps

EPS = 1e-6
PDL = COMPILED and torch.cuda.get_device_capability() >= (9, 0)
# Where neither dimension is a multiple of a tile, and where the inputs take several tiles or fill one exactly.
SHAPES = [(64, 40), (96, 4099), (1024, 24), (5000, 9)]


@dataclass(frozen=True, slots=True)
class Product:
    """The arguments of one product."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    gated: bool

    def expected(self, norm_weight: Tensor | None = None) -> Tensor:
        """[T, out_features] in float64."""
        x = self.x.double()
        if norm_weight is not None:
            x = functional.rms_norm(x, x.shape[-1:], norm_weight.double(), EPS)
        y = functional.linear(x, self.weight.double(), None if self.bias is None else self.bias.double())
        if self.gated:
            gate, up = y.chunk(2, dim=-1)
            y = functional.silu(gate) * up
        return y if self.residual is None else y + self.residual.double()

    def options(self) -> dict[str, Any]:
        return {"gated": self.gated, "residual": self.residual}


def product(rows: int, shape: tuple[int, int], dtype: torch.dtype, *, bias: bool, add: bool, gated: bool) -> Product:
    inputs, outputs = shape
    weight = (randn(outputs * (2 if gated else 1), inputs, seed=1) * inputs**-0.5).to(dtype)
    return Product(
        randn(rows, inputs, dtype=dtype),
        weight,
        randn(outputs, dtype=dtype, seed=2) if bias else None,
        randn(rows, outputs, dtype=dtype, seed=3) if add else None,
        gated,
    )


KINDS = [
    {"bias": False, "add": False, "gated": False},
    {"bias": True, "add": True, "gated": False},
    {"bias": False, "add": False, "gated": True},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_norm", [False, True])
def test_one_row(dtype: torch.dtype, shape: tuple[int, int], kind: dict[str, bool], has_norm: bool) -> None:
    case = product(1, shape, dtype, **kind)
    norm_weight = randn(shape[0], dtype=dtype, seed=4) if has_norm else None
    expected = case.expected(norm_weight)
    actual = gemv(case.x, case.weight, case.bias, norm_weight=norm_weight, eps=EPS, **case.options())
    assert_close(actual, expected)
    assert case.residual is None or actual is case.residual


@pytest.mark.parametrize("dtype", [torch.bfloat16] if COMPILED else DTYPES)
@pytest.mark.parametrize(("rows", "shape"), [(2, (96, 40)), (7, (1024, 24)), (16, (64, 4099)), (32, (5000, 9))])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_norm", [False, True])
def test_few_rows(dtype: torch.dtype, rows: int, shape: tuple[int, int], kind: dict[str, bool], has_norm: bool) -> None:
    case = product(rows, shape, dtype, **kind)
    norm_weight = randn(shape[0], dtype=dtype, seed=4) if has_norm else None
    expected = case.expected(norm_weight)
    actual = fused_linear(case.x, case.weight, case.bias, norm_weight=norm_weight, eps=EPS, **case.options())
    assert_close(actual, expected)
    assert case.residual is None or actual is case.residual


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "shape"), [(9, (200, 100)), (64, (256, 64)), (40, (520, 24))])
@pytest.mark.parametrize("kind", KINDS)
def test_many_rows(dtype: torch.dtype, rows: int, shape: tuple[int, int], kind: dict[str, bool]) -> None:
    case = product(rows, shape, dtype, **kind)
    expected = case.expected()
    actual = tiled_linear(case.x, case.weight, case.bias, pdl=PDL, **case.options())
    assert_close(actual, expected)
    assert case.residual is None or actual is case.residual


def test_a_row_does_not_depend_on_those_beside_it() -> None:
    """Nor on how many there are, as far as they take the same tile."""
    case = product(8, (1024, 40), torch.bfloat16, bias=False, add=False, gated=True)
    options = {"norm_weight": randn(1024, dtype=torch.bfloat16, seed=4), "eps": EPS, "gated": True}
    together = fused_linear(case.x, case.weight, **options)
    for count in (2, 5):
        assert torch.equal(fused_linear(case.x[:count].clone(), case.weight, **options), together[:count])


@pytest.mark.parametrize("linear", [fused_linear, tiled_linear])
def test_padded_rows_and_outputs_are_not_written(linear: Callable[..., Tensor]) -> None:
    case = product(5, (64, 24), torch.bfloat16, bias=False, add=False, gated=False)
    wide = poisoned(8, 40, dtype=torch.bfloat16)
    wide[:5, :24] = 0
    linear(case.x, case.weight, residual=wide[:5, :24])
    assert_close(wide[:5, :24], case.expected())
    assert wide[5:].isnan().all() and wide[:, 24:].isnan().all()


@pytest.mark.parametrize("linear", [fused_linear, tiled_linear])
def test_rows_may_be_strided(linear: Callable[..., Tensor]) -> None:
    wide, weight = randn(3, 256, dtype=torch.bfloat16), randn(40, 128, dtype=torch.bfloat16, seed=1)
    assert_close(linear(wide[:, :128], weight), functional.linear(wide[:, :128].double(), weight.double()))


def test_which_rows_are_few() -> None:
    eight, many = randn(8, 64, dtype=torch.bfloat16), randn(33, 64, dtype=torch.bfloat16)
    assert is_faster(eight, normed=True) and is_faster(eight, normed=False)
    assert not is_faster(many, normed=False)
    assert not is_faster(eight.float(), normed=True), "products of float32 rows don't run on tensor cores"


def test_which_rows_are_many() -> None:
    weight = randn(6144, 64, dtype=torch.bfloat16)
    rows, too_many = randn(64, 64, dtype=torch.bfloat16), randn(65, 64, dtype=torch.bfloat16)
    assert is_faster_in_tiles(rows, weight) and is_faster_in_tiles(rows, weight, gated=True)
    assert not is_faster_in_tiles(too_many, weight)
    assert not is_faster_in_tiles(rows, weight[:64]), "one program would have all of the product"
    assert not is_faster_in_tiles(rows.float(), weight.float())
    assert not is_faster_in_tiles(rows[:, :60], weight[:, :60]), "tensor descriptors need rows of whole 16 bytes"


def test_layers_use_the_products_of_many_rows() -> None:
    """With a norm ahead, the activation or the residual, as the operations of layers are defined."""
    x, residual = randn(40, 64, dtype=torch.bfloat16), randn(40, 3072, dtype=torch.bfloat16, seed=3)
    weight = (randn(6144, 64, seed=1) / 8).to(torch.bfloat16)
    norm, ops = Norm(randn(64, dtype=torch.bfloat16, seed=4), EPS), TritonOps(PDL)
    y = functional.rms_norm(x.double(), x.shape[-1:], norm.weight.double(), EPS)
    gate, up = functional.linear(y, weight.double()).chunk(2, dim=-1)
    assert_close(ops.norm_linear(x, norm, weight[:3072]), gate, roundings=2)
    assert_close(ops.norm_gated_linear(x, norm, weight), functional.silu(gate) * up, roundings=2)
    expected = residual.double() + functional.linear(x.double(), weight[:3072].double())
    assert_close(ops.linear_add(x, weight[:3072], residual), expected)
