"""Writes scattered changes into an array. Reference: values[index] = new."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


def scatter(changes: Tensor, *, out: Tensor) -> None:
    """out[changes[0]] = changes[1]. `changes` [2, n] int32, contiguous, no index twice; `out` int32, flat."""
    count = changes.shape[1]
    _scatter_kernel[(triton.cdiv(count, _BLOCK),)](changes, out, count, BLOCK=_BLOCK, num_warps=4)


@triton.jit(do_not_specialize=["count"])
def _scatter_kernel(changes_ptr: tl.tensor, out_ptr: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr) -> None:
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    index = tl.load(changes_ptr + i, mask=inside, other=0)
    tl.store(out_ptr + index, tl.load(changes_ptr + count + i, mask=inside, other=0), mask=inside)
