"""Counter-based sampling noise, keyed by (64-bit seed, absolute position of the sampled token, vocabulary index).

Written in 32-bit multiplications, additions, exclusive ors and shifts, so that it is the same bits on every device;
numpy's uint32 is the definition, torch does the same on int32. The constants of both hashes were found with Chris
Wellons' hash-prospector: keys are mixed by its best one of two multiplications (bias 0.107), elements by its triple32
without the first shift, which a random key makes needless. The second key joins half way: with the first alone the
noise of rows whose keys are near each other would be a permutation of the same values.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.layers.transfer import to_device

UInts = NDArray[np.uint32]

_FIRST, _SECOND = 0x21F0AAAD, 0xD35A2D97
_ELEMENT = 0xED5AD4BB, 0xAC4C1B51, 0x31848BAB
_LOW, _HIGH = 0x9E3779B9, 0x85EBCA6B  # keep an all-zero key from mixing to zero


def mix(x: UInts) -> UInts:
    """A bijection of 32 bits in which each input bit flips each output bit half of the time."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(_FIRST)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(_SECOND)
    return x ^ (x >> np.uint32(15))


def row_keys(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> tuple[UInts, UInts]:
    """Two 32-bit keys per row, [N] each. For one position different seeds never give the same pair."""
    low = mix(seeds.astype(np.uint32) ^ np.uint32(_LOW))
    high = mix((seeds >> np.uint64(32)).astype(np.uint32) ^ low ^ np.uint32(_HIGH))
    first = mix((low ^ positions.astype(np.uint32)) + high)
    return first, mix(high ^ first)


def noise_bits(keys: tuple[UInts, UInts], indices: UInts) -> UInts:
    """[N, V]: 32 random bits for every row and vocabulary index."""
    first, second = keys
    one, two, three = (np.uint32(factor) for factor in _ELEMENT)
    x = (indices ^ first[:, None]) * one
    x = ((x ^ (x >> np.uint32(11))) + second[:, None]) * two
    x = (x ^ (x >> np.uint32(15))) * three
    return x ^ (x >> np.uint32(14))


def torch_noise_bits(keys: tuple[UInts, UInts], start: int, count: int, device: torch.device | None = None) -> Tensor:
    """noise_bits of the indices start to start + count, the bits as int32."""
    first, second = (to_device(key.view(np.int32)[:, None], device or torch.device("cpu")) for key in keys)
    one, two, three = (_signed(factor) for factor in _ELEMENT)  # int32 products and sums wrap
    x = (torch.arange(start, start + count, dtype=torch.int32, device=device) ^ first).mul_(one)
    x.bitwise_xor_(_shifted(x, 11)).add_(second).mul_(two)
    x.bitwise_xor_(_shifted(x, 15)).mul_(three)
    return x.bitwise_xor_(_shifted(x, 14))


def _shifted(x: Tensor, by: int) -> Tensor:
    """x >> by without the sign."""
    return (x >> by).bitwise_and_((1 << 32 - by) - 1)


def _signed(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x


def exponential(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """E ~ Exp(1) = -log(1 - u) for u = (bits + 0.5) / 2^32, finite and above zero.

    Both tails keep all 32 bits: w is u or 1 - u, whichever is below a half, so nothing rounds to 0 or 1.
    """
    upper = bits < 0  # as unsigned: from 2^31 on
    w = (torch.where(upper, ~bits, bits).to(dtype) + 0.5) * 2.0**-32
    return torch.where(upper, w.log(), (-w).log1p()).neg_()
