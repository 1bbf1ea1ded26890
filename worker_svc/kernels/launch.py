"""What all kernels share: programmatic dependent launch, and what the interpreter can't do.

Programmatic dependent launch (compute capability 9.0) starts a kernel while the one before it still runs, and as all
release the next one at once, several may be under way. So before a kernel waits it may read only what none of the last
few wrote, such as weights, and write nothing. Behind a kernel that was launched without it, which starts when all
before has ended, that is all but what this kernel reads and writes; so it is behind one that waits before it releases.
"""

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from shared.errors import StartupError

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

HEAD_DIMS = (32, 64, 128)


@triton.jit
def release_next(PDL: tl.constexpr) -> None:
    """Lets the next kernel start as soon as all programs of this one have come here or ended."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr) -> None:
    """Waits until the kernel before has ended and its writes are visible. Every kernel calls it: else the one after
    could overtake the one before."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def offset_after_previous(offset: tl.tensor, MULTIPLE: tl.constexpr, PDL: tl.constexpr) -> tl.tensor:
    """`offset`, a multiple of MULTIPLE, but not before wait_for_previous would return.

    Of a pipelined loop's loads, those at this offset wait; the others are sent ahead of it, where wait_for_previous
    before the loop would hold all of them back. The pipeliner takes only pure operations, and nothing else keeps the
    loads at this offset behind the wait.
    """
    if PDL:
        offset = tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [offset], dtype=tl.int32, is_pure=True, pack=1
        )
    return offset // MULTIPLE * MULTIPLE  # tells the compiler how the loads are aligned


@triton.jit
def prefetch(pointers: tl.tensor) -> None:
    """Fetches the lines of memory at these addresses into the L2 cache; not in the interpreter."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


def launch_options(pdl: bool) -> dict[str, Any]:
    """Keywords of a launch with or without programmatic dependent launch."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


@triton.jit
def dot(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """a @ b in float32, without rounding float32 operands to tf32; some interpreters get bfloat16 products wrong."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def load_inside(source: tl.tensor, inside: tl.tensor, WHOLE: tl.constexpr) -> tl.tensor:
    """Zero where it is not inside; without a mask where all is."""
    if WHOLE:
        return tl.load(source)
    else:
        return tl.load(source, mask=inside, other=0)


@triton.jit
def fast_log2(x: tl.tensor) -> tl.tensor:
    """One instruction where tl.log2 is a polynomial: absolute error below 2^-22 near 1, relative elsewhere."""
    if INTERPRETED:
        return tl.log2(x)
    else:
        return libdevice.fast_log2f(x)


def check_head_dim(head_dim: int) -> None:
    """Raises StartupError for a head size that the kernels don't have."""
    if head_dim not in HEAD_DIMS:
        raise StartupError(f"head_dim {head_dim}: the Triton kernels have {HEAD_DIMS}; use the torch backend")


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have; without a GPU those of compute capability 9.0."""
    if device.type != "cuda":
        return 227 << 10
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # torch's stubs lack it


def row_stride(x: Tensor) -> int:
    """Elements between rows of a tensor whose rows are contiguous."""
    assert x.stride(-1) == 1, "rows are contiguous"
    return x.stride(0)
