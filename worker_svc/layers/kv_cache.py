"""K/V memory in blocks. Which sequence owns a block is the scheduler's knowledge, not kept here."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.types import IntArray


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's K and V, [num_blocks, block_size, num_kv_heads, head_dim] each."""

    key: Tensor
    value: Tensor


class KVCache:
    """The K/V blocks of all layers on one rank. Zeroed at first: a masked NaN would still poison a weighted sum."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
        self.num_blocks = num_blocks
        self._memory = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = [LayerCache(layer[0], layer[1]) for layer in self._memory]

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self._memory.device

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self._memory.nbytes

    def zero(self, block_ids: IntArray) -> None:
        """Fills blocks with zeros in every layer."""
        if len(block_ids):
            self._memory[:, :, torch.from_numpy(block_ids.astype("int64")).to(self._memory.device)] = 0


def block_bytes(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Memory of one block over all layers, K and V, on one rank."""
    return num_layers * 2 * block_size * num_kv_heads * head_dim * dtype.itemsize
