"""The sampling noise that layers.noise defines, inside kernels: the same bits, faster logarithms."""

import triton
import triton.language as tl

from worker_svc.kernels.launch import fast_log2

_LN2 = tl.constexpr(0.6931471805599453)
_TO_ONE = tl.constexpr(2.3283064365386963e-10)  # 2^-32


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit
def row_keys(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Two uint32 keys of an int64 seed and an int32 position."""
    low = _mix(seed.to(tl.uint32) ^ 0x9E3779B9)
    high = _mix((seed >> 32).to(tl.uint32) ^ low ^ 0x85EBCA6B)
    first = _mix((low ^ position.to(tl.uint32)) + high)
    return first, _mix(high ^ first)


@triton.jit
def noise_bits(first: tl.tensor, second: tl.tensor, index: tl.tensor) -> tl.tensor:
    """32 random bits for each vocabulary index."""
    x = (index.to(tl.uint32) ^ first) * 0xED5AD4BB
    x = ((x ^ (x >> 11)) + second) * 0xAC4C1B51
    x = (x ^ (x >> 15)) * 0x31848BAB
    return x ^ (x >> 14)


@triton.jit
def gumbel(bits: tl.tensor) -> tl.tensor:
    """-log2(E) with E ~ Exp(1), Gumbel noise for logits in units of log 2; finite for all bits.

    E = -log(1 - u), u = (bits + 0.5) / 2^32. In float32 1 - u would round small u away, and they are the ones that
    win: up to 0.02 a series stands for the logarithm, with a relative error of 2e-6.
    """
    u = bits.to(tl.float32) * _TO_ONE + _TO_ONE / 2
    rest = (bits ^ 0xFFFFFFFF).to(tl.float32) * _TO_ONE + _TO_ONE / 2  # 1 - u, whose small values keep all bits
    series = u * (1 + u * (0.5 + u * 0.3333333333))
    return -fast_log2(tl.where(u > 0.02, -_LN2 * fast_log2(rest), series))
