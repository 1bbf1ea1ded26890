"""Brings what a step sampled to the host: written there by the kernel itself, without a copy of its own.

Part of a step's graph, so every step writes to the same ring of memory, one step's place after the other.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.launch import launch_options, release_next, wait_for_previous


@dataclass(frozen=True, slots=True)
class Ring:
    """The last N steps' tokens of up to S rows."""

    sampled: Tensor
    """[N, 2, S] int32 in pinned host memory: token ids, and 1 where a row failed. N is a power of two."""
    turn: Tensor
    """[1] int32 on the device: how many steps have been delivered; it wraps around."""


def deliver(sampled: Tensor, rows: int, ring: Ring, *, pdl: bool = False) -> None:
    """ring.sampled[turn % N, :, :rows] = sampled[:, :rows], then turn += 1. `sampled` [2, S] int32."""
    places, _, width = ring.sampled.shape
    assert places & (places - 1) == 0, "turns wrap around at a power of two"
    _deliver_kernel[(1,)](
        sampled,
        ring.sampled,
        ring.turn,
        rows,
        width,
        PLACES=places,
        BLOCK=triton.next_power_of_2(rows),
        num_warps=4,
        **launch_options(pdl),
    )


@triton.jit
def _deliver_kernel(
    sampled_ptr: tl.tensor,
    ring_ptr: tl.tensor,
    turn_ptr: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    release_next(PDL)
    row = tl.arange(0, BLOCK)
    inside = row < rows
    wait_for_previous(PDL)
    turn = tl.atomic_add(turn_ptr, 1)  # one value for all warps: a load and a store of theirs would race
    out = ring_ptr + (turn & (PLACES - 1)) * 2 * width
    tl.store(out + row, tl.load(sampled_ptr + row, mask=inside, other=0), mask=inside)
    tl.store(out + width + row, tl.load(sampled_ptr + width + row, mask=inside, other=0), mask=inside)
