"""Matrix products of 2 to 32 rows with what stands after them: bias, SwiGLU's activation, the residual. Reference:
layers.torch_ops.

Such a product is a stream of weights. With programmatic dependent launch each program has its first tiles of weights
on their way before the kernel ahead ends, and leaves shared memory for its successor to do the same beside it. Warps
divide the inputs among them, since a program has too few outputs to share.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.launch import dot, launch_options, offset_after_previous, release_next, row_stride

MAX_ROWS = 32  # from here on cuBLAS, whose tiles read the rows less often, is as fast
_WARPS = tl.constexpr(4)
_PROGRAMS = 128  # about one per multiprocessor
_MOST_BUFFERS = 3
_SHARED_MEMORY = 200 << 10  # of a compute capability 9.0 program, less what the sum over the warps takes


@dataclass(frozen=True, slots=True)
class _Tile:
    rows: int
    outputs: int
    inputs: int
    buffers: int
    """Tiles of weights and rows that are on their way at a time."""


def has_few_rows(x: Tensor) -> bool:
    """Whether fused_linear takes these rows, and is faster than its parts."""
    return len(x) <= MAX_ROWS and x.element_size() == 2 and _shared_memory(x.device) >= _SHARED_MEMORY


def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    residual: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """x @ weight^T + bias; with `gated` silu(gate) * up of its halves; plus `residual`, which takes the sum.

    `x` [T, in_features] of at most MAX_ROWS rows, `weight` [out_features, in_features], twice as many rows where it is
    gated. Gives [T, out_features].
    """
    rows, inputs = x.shape
    outputs = len(weight) // 2 if gated else len(weight)
    assert rows <= MAX_ROWS
    out = x.new_empty(rows, outputs) if residual is None else residual
    tile = _tile(rows, outputs, inputs, 2 if gated else 1)
    _fused_linear_kernel[(triton.cdiv(outputs, tile.outputs),)](
        x,
        weight,
        weight[outputs:] if gated else weight,
        weight if bias is None else bias,
        out,
        rows,
        outputs,
        inputs,
        row_stride(x),
        row_stride(weight),
        row_stride(out),
        GATED=gated,
        HAS_BIAS=bias is not None,
        ADD=residual is not None,
        WHOLE_TILES=inputs % tile.inputs == 0,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        INPUTS=tile.inputs,
        STAGES=tile.buffers + 1,
        num_warps=_WARPS.value,
        **launch_options(pdl),
    )
    return out


def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have."""
    if device.type != "cuda":
        return _SHARED_MEMORY
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def _tile(rows: int, outputs: int, inputs: int, matrices: int) -> _Tile:
    """Narrow enough that there is a program for every multiprocessor, long enough that many bytes are on their way."""
    tile_rows = 16 if rows <= 16 else 32
    tile_outputs = min(max(triton.next_power_of_2(outputs // _PROGRAMS), 8), 32)
    most_inputs = 1024 if tile_outputs == 8 and tile_rows == 16 else 512
    tile_inputs = min(max(triton.next_power_of_2(inputs), 64), most_inputs)
    bytes_each = 2 * tile_inputs * (tile_rows + matrices * tile_outputs)
    buffers = min(_SHARED_MEMORY // bytes_each, triton.cdiv(inputs, tile_inputs), _MOST_BUFFERS)
    return _Tile(tile_rows, tile_outputs, tile_inputs, buffers)


@triton.jit(do_not_specialize=["rows"])
def _fused_linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    up_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    out_stride: tl.tensor,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per OUTPUTS outputs. Each warp sums over its own part of a tile's inputs."""
    release_next(PDL)
    PART: tl.constexpr = INPUTS // _WARPS
    column = tl.arange(0, _WARPS)[:, None] * PART + tl.arange(0, PART)[None, :]  # [_WARPS, PART]
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    x_source = x_ptr + row[None, :, None] * x_stride + column[:, None, :]  # [_WARPS, ROWS, PART]
    x_mask = (row < rows)[None, :, None]
    # Programs at the edge compute the last output again, so that no load of weights needs a mask.
    offset = tl.minimum(output, outputs - 1).to(tl.int64)[None, None, :] * weight_stride + column[:, :, None]
    bias = tl.zeros([OUTPUTS], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + output, mask=output < outputs, other=0).to(tl.float32)
    total = tl.zeros([_WARPS, ROWS, OUTPUTS], tl.float32)
    up_total = tl.zeros([_WARPS, ROWS, OUTPUTS], tl.float32)
    for start in tl.range(0, inputs, INPUTS, num_stages=STAGES):
        if WHOLE_TILES:
            weight = tl.load(weight_ptr + offset + start)
        else:
            inside = start + column < inputs
            x_mask = (row < rows)[None, :, None] & inside[:, None, :]
            weight = tl.load(weight_ptr + offset + start, mask=inside[:, :, None], other=0)
        if GATED:
            if WHOLE_TILES:
                up = tl.load(up_ptr + offset + start)
            else:
                up = tl.load(up_ptr + offset + start, mask=inside[:, :, None], other=0)
        x = tl.load(x_source + offset_after_previous(start, INPUTS, PDL), mask=x_mask, other=0)
        total += dot(x, weight)
        if GATED:
            up_total += dot(x, up)
    y = tl.sum(total, axis=0) + bias[None, :]
    if GATED:
        y = y * tl.sigmoid(y) * tl.sum(up_total, axis=0)
    target = out_ptr + row[:, None] * out_stride + output[None, :]
    mask = (row < rows)[:, None] & (output < outputs)[None, :]
    if ADD:
        y += tl.load(target, mask=mask, other=0).to(tl.float32)
    tl.store(target, y.to(out_ptr.dtype.element_ty), mask=mask)
