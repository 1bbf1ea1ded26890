"""QK norm, rotary embedding (Su et al. 2021) and the K/V store, in one pass over the packed rows of the qkv projection.
Reference: layers.rotary.rotate and layers.norm.RMSNorm.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.launch import check_head_dim, launch_options, release_next, row_stride, wait_for_previous

_ELEMENTS = 1024  # of a row per program


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMSNorm of each query and key head."""

    query_weight: Tensor
    """[head_dim]"""
    key_weight: Tensor
    """[head_dim]"""
    eps: float


def rotate_and_store(
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm: QKNorm | None,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    pdl: bool = False,
) -> None:
    """Norms and rotates the query heads in place and the key heads on their way into the cache; stores the values.

    qkv          [T, (num_heads + 2 x num_kv_heads) x head_dim]: queries, keys, values; bias already added
    positions    [T] int; slot_mapping [T] int: block id x block size + offset, -1 stores nothing
    cos, sin     [max positions, head_dim / 2] float32
    key_cache    [num_blocks, block_size, num_kv_heads, head_dim], contiguous; value_cache likewise

    Positions, slot mapping and tables must be older than the kernel before. Raises StartupError for a head_dim that
    the kernels don't have.
    """
    num_kv_heads, head_dim = key_cache.shape[2:]
    check_head_dim(head_dim)
    assert key_cache.is_contiguous() and value_cache.is_contiguous()
    total_heads = qkv.shape[1] // head_dim
    heads = min(_ELEMENTS // head_dim, triton.next_power_of_2(total_heads))
    _rotate_and_store_kernel[(qkv.shape[0], triton.cdiv(total_heads, heads))](
        qkv,
        positions,
        slot_mapping,
        cos,
        sin,
        cos if norm is None else norm.query_weight,
        cos if norm is None else norm.key_weight,
        key_cache,
        value_cache,
        row_stride(qkv),
        0.0 if norm is None else norm.eps,
        NUM_HEADS=total_heads - 2 * num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HEADS=heads,
        QK_NORM=norm is not None,
        num_warps=4,
        **launch_options(pdl),
    )


@triton.jit
def _rotate_and_store_kernel(
    qkv_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    query_weight_ptr: tl.tensor,
    key_weight_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    qkv_stride: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    QK_NORM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per token and HEADS of its heads, held as two halves: the rotation pairs i and i + head_dim / 2."""
    release_next(PDL)
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]  # [HEADS, 1]
    dim = tl.arange(0, HALF)[None, :]  # [1, HALF]
    is_query = head < NUM_HEADS
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * HALF + dim)
    sin = tl.load(sin_ptr + position * HALF + dim)
    if QK_NORM:
        x_weight = tl.where(is_query, tl.load(query_weight_ptr + dim), tl.load(key_weight_ptr + dim))
        y_weight = tl.where(is_query, tl.load(query_weight_ptr + HALF + dim), tl.load(key_weight_ptr + HALF + dim))
    wait_for_previous(PDL)
    source = qkv_ptr + token * qkv_stride + head * HEAD_DIM + dim  # [HEADS, HALF]
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (dim < HALF)
    first, second = tl.load(source, mask=inside, other=0), tl.load(source + HALF, mask=inside, other=0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    if QK_NORM:
        square = tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)
        scale = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        x = ((x * scale).to(first.dtype).to(tl.float32) * x_weight.to(tl.float32)).to(first.dtype).to(tl.float32)
        y = ((y * scale).to(first.dtype).to(tl.float32) * y_weight.to(tl.float32)).to(first.dtype).to(tl.float32)
    rotated_first = (x * cos - y * sin).to(first.dtype)
    rotated_second = (y * cos + x * sin).to(first.dtype)
    tl.store(source, rotated_first, mask=is_query & inside)
    tl.store(source + HALF, rotated_second, mask=is_query & inside)
    stored_heads = tl.where(slot >= 0, NUM_HEADS + 2 * NUM_KV_HEADS, 0)  # none of a token without a slot
    is_key = (head >= NUM_HEADS) & (head < tl.minimum(stored_heads, NUM_HEADS + NUM_KV_HEADS))
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < stored_heads)
    key = key_cache_ptr + (slot * NUM_KV_HEADS + head - NUM_HEADS) * HEAD_DIM + dim
    tl.store(key, rotated_first, mask=is_key & inside)
    tl.store(key + HALF, rotated_second, mask=is_key & inside)
    value = value_cache_ptr + (slot * NUM_KV_HEADS + head - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM + dim
    tl.store(value, first, mask=is_value & inside)
    tl.store(value + HALF, second, mask=is_value & inside)
