"""The largest of many integers inside a kernel: a bitonic sort (Batcher 1968) that drops half after each merge."""

import triton
import triton.language as tl

_ONE = tl.constexpr(1)  # interpreted, an int cannot be shifted by a constexpr


@triton.jit
def largest(x: tl.tensor, LOG_N: tl.constexpr, LOG_K: tl.constexpr) -> tl.tensor:
    """The 2^LOG_K largest of [2^LOG_N] integers, descending."""
    for level in tl.static_range(1, LOG_K + 1):
        for step in tl.static_range(level):
            x = _exchange(x, LOG_N, level - 1 - step, level)
    for halving in tl.static_range(1, LOG_N - LOG_K + 1):
        x = _halve(x, LOG_N - halving, LOG_K)
    return x


@triton.jit
def _halve(x: tl.tensor, LOG_N: tl.constexpr, LOG_K: tl.constexpr) -> tl.tensor:
    """Runs of 2^LOG_K are sorted, descending and ascending in turn. Two of them, laid over each other, give the larger
    half as a bitonic run, which is sorted. 2^LOG_N are left."""
    runs = tl.reshape(x, [_ONE << (LOG_N - LOG_K), 2, _ONE << LOG_K])
    x = tl.reshape(tl.max(runs, axis=1), [_ONE << LOG_N])
    for step in tl.static_range(LOG_K):
        x = _exchange(x, LOG_N, LOG_K - 1 - step, LOG_K)
    return x


@triton.jit
def _exchange(x: tl.tensor, LOG_N: tl.constexpr, LOG_DISTANCE: tl.constexpr, LOG_RUN: tl.constexpr) -> tl.tensor:
    """Orders the pairs a distance apart: the larger first in every other run, the smaller first in the rest."""
    GROUPS: tl.constexpr = _ONE << (LOG_N - LOG_DISTANCE - 1)
    pairs = tl.reshape(x, [GROUPS, 2, _ONE << LOG_DISTANCE])
    partners = tl.sum(pairs, axis=1, keep_dims=True) - pairs  # sums wrap, so this is exact
    second = tl.arange(0, 2)[None, :, None]
    ascending = (tl.arange(0, GROUPS)[:, None, None] >> (LOG_RUN - LOG_DISTANCE - 1)) & 1
    ordered = tl.where(second == ascending, tl.maximum(pairs, partners), tl.minimum(pairs, partners))
    return tl.reshape(ordered, [_ONE << LOG_N])
