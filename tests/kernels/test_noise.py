"""The noise in kernels has the bits of layers.noise and is close to its exact logarithms."""

import numpy as np
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels import DEVICE, ints, poisoned
from worker_svc.kernels.noise import gumbel, noise_bits, row_keys
from worker_svc.layers.noise import exponential
from worker_svc.layers.noise import noise_bits as expected_bits
from worker_svc.layers.noise import row_keys as expected_keys


@triton.jit
def _bits_kernel(seeds_ptr, positions_ptr, out_ptr, start, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    first, second = row_keys(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    i = tl.arange(0, COUNT)
    tl.store(out_ptr + row * COUNT + i, noise_bits(first, second, start + i).to(tl.int32, bitcast=True))


@triton.jit
def _gumbel_kernel(bits_ptr, out_ptr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(out_ptr + i, gumbel(tl.load(bits_ptr + i).to(tl.uint32, bitcast=True)))


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=4),
    st.integers(0, 2**20),
)
def test_bits(rows: list[tuple[int, int]], start: int) -> None:
    seeds = np.array([seed for seed, _ in rows], dtype=np.uint64)
    positions = np.array([position for _, position in rows], dtype=np.int64)
    out = poisoned(len(rows), 64, dtype=torch.int32)
    device_seeds = torch.from_numpy(seeds.view(np.int64)).to(DEVICE)
    _bits_kernel[(len(rows),)](device_seeds, ints(positions.tolist()), out, start, COUNT=64)
    expected = expected_bits(expected_keys(seeds, positions), np.arange(start, start + 64, dtype=np.uint32))
    np.testing.assert_array_equal(out.cpu().numpy().view(np.uint32), expected)


def noise_of(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Of the kernels, and exact."""
    out = poisoned(len(bits), dtype=torch.float32)
    _gumbel_kernel[(len(bits) // 1024,)](bits.to(DEVICE), out, COUNT=1024)
    return out.double().cpu(), -exponential(bits, torch.float64).log2()


def test_logarithms() -> None:
    generator = torch.Generator().manual_seed(0)
    actual, expected = noise_of(torch.randint(-(2**31), 2**31, (1 << 16,), generator=generator, dtype=torch.int32))
    torch.testing.assert_close(actual, expected, rtol=0, atol=3e-5)


def test_logarithms_of_the_tails() -> None:
    """The least E wins a sample: no u may round to 0 or 1."""
    low = torch.arange(1 << 15, dtype=torch.int32)
    powers = (2 ** torch.arange(31, dtype=torch.int64)).int().repeat(1024)[: 1 << 15]
    for bits in (low, ~low, low - (1 << 14) + (1 << 30), powers, ~powers, low - (1 << 14) - (1 << 31)):
        actual, expected = noise_of(bits.int())
        torch.testing.assert_close(actual, expected, rtol=0, atol=3e-5)
