"""Scattered changes land where they belong, and nowhere else."""

import pytest
import torch

from tests.kernels import DEVICE, poisoned
from worker_svc.kernels.scatter import scatter


@pytest.mark.parametrize("count", [1, 255, 256, 700])
def test_equal_to_assignment(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    index = torch.randperm(1000, generator=generator)[:count]
    values = torch.randint(-1000, 1000, (count,), generator=generator)
    out = poisoned(1000, dtype=torch.int32)
    expected = out.clone()
    expected[index.to(DEVICE)] = values.to(DEVICE, torch.int32)
    scatter(torch.stack((index, values)).int().to(DEVICE), out=out)
    assert torch.equal(out, expected)
