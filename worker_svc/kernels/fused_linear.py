"""Matrix products of 2 to 32 rows with what stands around them: the norm of the rows, bias, SwiGLU's activation, the
residual. Reference: layers.torch_ops.

Such a product is a stream of weights. With programmatic dependent launch each program has its first tiles of weights
on their way before the kernel ahead ends, and leaves shared memory for its successor to do the same beside it. Warps
divide the inputs among them, since a program has too few outputs to share.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.launch import (
    dot,
    launch_options,
    load_inside,
    offset_after_previous,
    release_next,
    row_stride,
    shared_memory,
)

MAX_ROWS = 32
_MAX_ROWS_NORMED = 8  # every program norms all rows: for more of them a kernel of its own is faster
_WARPS = tl.constexpr(4)
_PROGRAMS = 128  # about one per multiprocessor
_MOST_BUFFERS = 4
_SHARED_MEMORY = 200 << 10  # of a program's, less what the sum over the warps takes


@dataclass(frozen=True, slots=True)
class _Tile:
    rows: int
    outputs: int
    inputs: int
    buffers: int
    """Tiles of weights and rows that are on their way at a time."""


def is_faster(x: Tensor, *, normed: bool) -> bool:
    """Whether fused_linear takes these rows, and less time than cuBLAS with kernels before or after it: as measured
    at the shapes of Qwen3-0.6B and Qwen3-8B. `normed`: with a norm, else with a residual."""
    fits = x.element_size() == 2 and shared_memory(x.device) >= _SHARED_MEMORY
    return fits and len(x) <= (_MAX_ROWS_NORMED if normed else MAX_ROWS)


def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """As gemv.gemv, of `x` [T, in_features] of at most MAX_ROWS rows, in 16 bits. Gives [T, out_features]."""
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
        weight if norm_weight is None else norm_weight,
        out,
        rows,
        outputs,
        inputs,
        row_stride(x),
        row_stride(weight),
        row_stride(out),
        eps,
        NORM=norm_weight is not None,
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


def _tile(rows: int, outputs: int, inputs: int, matrices: int) -> _Tile:
    """Narrow enough that there is a program for every multiprocessor, long enough that many bytes are on their way.
    Where there are more programs than that, two share the memory of one multiprocessor."""
    tile_rows = max(triton.next_power_of_2(rows), 8)
    tile_outputs = min(max(triton.next_power_of_2(outputs // _PROGRAMS), 16), 32)
    most_inputs = 1024 if tile_outputs == 16 and tile_rows <= 16 else 512
    tile_inputs = min(max(triton.next_power_of_2(inputs), 64), most_inputs)
    bytes_each = 2 * tile_inputs * (tile_rows + matrices * tile_outputs)
    memory = _SHARED_MEMORY if outputs <= _PROGRAMS * tile_outputs else _SHARED_MEMORY // 2
    buffers = min(max(memory // bytes_each, 2), triton.cdiv(inputs, tile_inputs), _MOST_BUFFERS)
    return _Tile(tile_rows, tile_outputs, tile_inputs, buffers)


@triton.jit(do_not_specialize=["rows"])
def _fused_linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    up_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    out_stride: tl.tensor,
    eps: tl.tensor,
    NORM: tl.constexpr,
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
    """One program per OUTPUTS outputs. Each warp sums over its own part of a tile's inputs: [_WARPS, PART]."""
    release_next(PDL)
    PART: tl.constexpr = INPUTS // _WARPS
    column = tl.arange(0, _WARPS)[:, None] * PART + tl.arange(0, PART)[None, :]
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    x_source = x_ptr + row[None, None, :] * x_stride + column[:, :, None]  # [_WARPS, PART, ROWS]
    # Programs at the edge compute the last output again, so that no load of weights needs a mask for it.
    offset = tl.minimum(output, outputs - 1).to(tl.int64)[None, :, None] * weight_stride + column[:, None, :]
    bias = tl.zeros([OUTPUTS], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + output, mask=output < outputs, other=0).to(tl.float32)
    total = tl.zeros([_WARPS, OUTPUTS, ROWS], tl.float32)
    up_total = tl.zeros([_WARPS, OUTPUTS, ROWS], tl.float32)
    square = tl.zeros([_WARPS, ROWS], tl.float32)
    for start in tl.range(0, inputs, INPUTS, num_stages=STAGES):
        inside = column < inputs - start
        weight = load_inside(weight_ptr + offset + start, inside[:, None, :], WHOLE_TILES)
        if GATED:
            up = load_inside(up_ptr + offset + start, inside[:, None, :], WHOLE_TILES)
        if NORM:
            norm = load_inside(norm_ptr + start + column, inside, WHOLE_TILES).to(tl.float32)
        x_mask = (row < rows)[None, None, :]
        if not WHOLE_TILES:
            x_mask = x_mask & inside[:, :, None]
        x = tl.load(x_source + offset_after_previous(start, INPUTS, PDL), mask=x_mask, other=0)
        if NORM:
            wide = x.to(tl.float32)
            square += tl.sum(wide * wide, axis=1)
            x = (wide * norm[:, :, None]).to(x.dtype)
        total += dot(weight, x)
        if GATED:
            up_total += dot(up, x)
    y, up_y = tl.sum(total, axis=0), tl.sum(up_total, axis=0)  # [OUTPUTS, ROWS]
    if NORM:
        scale = tl.rsqrt(tl.sum(square, axis=0) / inputs + eps)[None, :]
        y, up_y = y * scale, up_y * scale
    y += bias[:, None]
    if GATED:
        y = y * tl.sigmoid(y) * up_y
    target = out_ptr + row[None, :] * out_stride + output[:, None]
    mask = (row < rows)[None, :] & (output < outputs)[:, None]
    if ADD:
        y += tl.load(target, mask=mask, other=0).to(tl.float32)
    tl.store(target, y.to(out_ptr.dtype.element_ty), mask=mask)
