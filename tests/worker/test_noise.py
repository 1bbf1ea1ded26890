"""The sampling noise is uniform and independent over each of its keys, and the same bits in numpy and torch.

Keys are as users choose them: small consecutive seeds, consecutive positions, consecutive vocabulary indices. All
inputs are fixed, so each statistic is one number; bounds are 5 standard deviations of a perfect source.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from worker_svc.layers.noise import exponential, noise_bits, row_keys, torch_noise_bits

N = 1 << 16

Bits = NDArray[np.uint32]


def bits(seeds: object, positions: object, indices: object) -> Bits:
    """Element by element, for arrays that broadcast to one dimension."""
    seeds, positions, indices = np.broadcast_arrays(seeds, positions, indices)
    keys = row_keys(seeds.astype(np.uint64), positions.astype(np.int64))
    return noise_bits(keys, indices.astype(np.uint32)[:, None])[:, 0]


COUNT = np.arange(N)
STREAMS = {
    "seed": bits(COUNT, 17, 5),
    "seed, high word": bits(COUNT.astype(np.uint64) << np.uint64(32), 17, 5),
    "position": bits(0, COUNT, 5),
    "index": bits(0, 17, COUNT),
    "seed and position together": bits(COUNT, COUNT, 5),
    "position and index together": bits(1, COUNT, COUNT),
    "position against index": bits(1, COUNT, N - COUNT),
}


def excess(counts: NDArray[np.int64]) -> float:
    """Chi-square of equal expectations, in standard deviations from its mean."""
    expected = counts.sum() / counts.size
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    return (chi_square - (counts.size - 1)) / (2 * (counts.size - 1)) ** 0.5


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=4),
    st.integers(0, 2**20),
)
def test_torch_has_the_bits_of_numpy(rows: list[tuple[int, int]], start: int) -> None:
    seeds, positions = zip(*rows, strict=True)
    keys = row_keys(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.int64))
    expected = noise_bits(keys, np.arange(start, start + 50, dtype=np.uint32))
    np.testing.assert_array_equal(torch_noise_bits(keys, start, 50).numpy().view(np.uint32), expected)


def test_known_values() -> None:
    """They must never change: a resumed request would go on with other noise."""
    keys = row_keys(np.array([0, 1 << 40], dtype=np.uint64), np.array([0, 100]))
    assert noise_bits(keys, np.arange(2, dtype=np.uint32)).tolist() == [
        [2047515969, 3574585846],
        [1408943523, 1175694280],
    ]


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS.keys())
@pytest.mark.parametrize("shift", [0, 12, 24])
def test_uniform(stream: Bits, shift: int) -> None:
    values = (stream >> np.uint32(shift)) & np.uint32(255)
    assert abs(excess(np.bincount(values, minlength=256))) < 5


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS.keys())
@pytest.mark.parametrize("lag", [1, 2, 64, 1024])
def test_independent_along_a_key(stream: Bits, lag: int) -> None:
    """Pairs of values a lag apart fill the square evenly."""
    top = (stream >> np.uint32(28)).astype(np.int64)
    assert abs(excess(np.bincount(top[:-lag] * 16 + top[lag:], minlength=256))) < 5


@pytest.mark.parametrize(
    ("key", "width"), [("seed", 64), ("position", 31), ("index", 20)], ids=["seed", "position", "index"]
)
def test_avalanche(key: str, width: int) -> None:
    """One flipped bit of a key flips every output bit half of the time."""
    count = 4096
    base = {"seed": np.arange(count, dtype=np.uint64), "position": np.arange(count), "index": np.arange(count)}
    for bit in range(width):
        flipped = {**base, key: base[key] ^ base[key].dtype.type(1 << bit)}
        changed = bits(*base.values()) ^ bits(*flipped.values())
        per_bit = np.unpackbits(changed.view(np.uint8).reshape(count, 4), axis=1).mean(axis=0)
        assert np.abs(per_bit - 0.5).max() < 6 * 0.5 / count**0.5, f"bit {bit} of the {key}"


@pytest.mark.parametrize("other", [(1, 17), (0, 18), (1 << 32, 17), (1, 16)])
def test_rows_of_neighbouring_keys_are_unrelated(other: tuple[int, int]) -> None:
    """Neither equal in place, nor a permutation of each other, nor correlated."""
    one, two = bits(0, 17, COUNT), bits(other[0], other[1], COUNT)
    assert len(np.intersect1d(one, two)) < 15  # N^2 / 2^32 = 1 expected
    correlation = np.corrcoef(one.astype(np.float64), two.astype(np.float64))[0, 1]
    assert abs(correlation) < 5 / N**0.5


def test_no_two_rows_have_the_same_keys() -> None:
    seeds, positions = np.meshgrid(np.arange(512, dtype=np.uint64), np.arange(512))
    first, second = row_keys(seeds.ravel(), positions.ravel())
    assert len(np.unique(first.astype(np.uint64) << np.uint64(32) | second)) == seeds.size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exponential_is_finite_and_above_zero(dtype: torch.dtype) -> None:
    edges = torch.tensor([0, 1, 2**31 - 1, -(2**31), -2, -1], dtype=torch.int32)  # as unsigned, in order
    values = exponential(edges, dtype)
    assert (values > 0).all() and values.log().isfinite().all()
    assert (values.diff() >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exponential_keeps_all_bits_in_both_tails(dtype: torch.dtype) -> None:
    """A likely token wins by a small E, an unlikely one by a tiny one: no two of them may fall together."""
    low = torch.arange(1000, dtype=torch.int32)
    assert (exponential(low, dtype).diff() > 0).all()
    assert (exponential(low - 1000, dtype).diff() > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exponential_has_its_distribution(dtype: torch.dtype) -> None:
    values = exponential(torch.from_numpy(STREAMS["index"].view(np.int32)), dtype).double().numpy()
    quantiles = (-np.expm1(-values) * 256).astype(np.int64)
    assert abs(excess(np.bincount(quantiles.clip(max=255), minlength=256))) < 5
