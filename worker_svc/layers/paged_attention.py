"""Attention of decode rows that a GPU holds, by an own Triton kernel. For rows of any length: layers.flash_attention.

A call depends on values that are on the device alone, so that it can be captured in a CUDA graph.
"""

from dataclasses import dataclass

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
