"""Attention of rows that a GPU holds: FlashAttention-3 for rows of any length, an own Triton kernel for decode.

Every call depends on values that are on the device alone, so that it can be captured in a CUDA graph.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker_svc.kernels.paged_attention import paged_attention
from worker_svc.kernels.parts import Parts
from worker_svc.layers.kv_cache import LayerCache

_MANY_ROWS = 64  # from here on a dependent launch takes more from the kernel before than it gains


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """Rows of one token each: the Triton kernel. See layers.attention.StepAttention."""

    block_tables: Tensor
    """[S, blocks] int32"""
    parts: Parts
    """Of the rows; a row of no token is padding."""
    pdl: bool

    def __call__(self, query: Tensor, cache: LayerCache) -> Tensor:
        """See StepAttention."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        paged_attention(
            query.flatten(1),
            cache.key,
            cache.value,
            self.block_tables,
            self.parts,
            out=out.flatten(1),
            pdl=self.pdl and len(query) < _MANY_ROWS,
        )
        return out


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of a rank's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


class FlashAttention3:
    """The package flash_attn_interface. Raises ImportError where it is not installed."""

    def __init__(self, heads: Heads, block_size: int) -> None:
        from flash_attn_interface import flash_attn_with_kvcache, get_scheduler_metadata

        self._attend: Callable[..., Any] = flash_attn_with_kvcache
        self._schedule: Callable[..., Any] = get_scheduler_metadata
        self._heads = heads
        self._block_size = block_size

    def prepare(self, cu_seqlens: Tensor, seq_lens: Tensor, block_tables: Tensor, max_query: int) -> "FlashStep":
        """For R rows: `cu_seqlens` [R + 1], `seq_lens` [R], `block_tables` [R, blocks], all int32; no row has more
        than `max_query` tokens. Does once what every layer would repeat."""
        heads = self._heads
        shared: dict[str, Any] = {
            "page_table": block_tables,
            "cache_seqlens": seq_lens,
            "cu_seqlens_q": cu_seqlens,
            "max_seqlen_q": max_query,
            "causal": True,
            "num_splits": 1,
        }
        shared["scheduler_metadata"] = self._schedule(
            len(seq_lens),
            max_query,
            block_tables.shape[1] * self._block_size,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            seq_lens,
            heads.dtype,
            cu_seqlens_q=cu_seqlens,
            page_size=self._block_size,
            causal=True,
            num_splits=1,
        )
        return FlashStep(self._attend, shared)


@dataclass(frozen=True, slots=True)
class FlashStep:
    """One step's rows. See layers.attention.StepAttention."""

    attend: Callable[..., Any]
    shared: dict[str, Any]

    def __call__(self, query: Tensor, cache: LayerCache) -> Tensor:
        """See StepAttention."""
        out: Tensor = self.attend(query, cache.key, cache.value, **self.shared)
        return out
