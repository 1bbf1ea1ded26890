"""The kernels against float64: compiled where there is a GPU, else in Triton's interpreter, with smaller shapes."""

import torch
from torch import Tensor

from tests.kernels import interpreter

COMPILED = torch.cuda.is_available()
DEVICE = torch.device("cuda" if COMPILED else "cpu")

if not COMPILED:
    interpreter.quicken()

DTYPES = (torch.float32, torch.bfloat16)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """Whatever a kernel doesn't write shows."""
    if dtype.is_floating_point:
        return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
    return torch.full(shape, -77, dtype=dtype, device=DEVICE)


def ints(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def assert_close(actual: Tensor, expected: Tensor, roundings: int = 1) -> None:
    """In the norm of the difference; `expected` in float64. NaN never passes. `roundings`: how often it was rounded."""
    difference = (actual.double().cpu() - expected.cpu()).norm()
    bound = {torch.bfloat16: 1e-2, torch.float16: 1e-3}.get(actual.dtype, 1e-5)
    assert float(difference) <= roundings * bound * float(expected.cpu().norm())
