"""Memory that the GPUs of one group read and write in each other, and the collectives through it.

torch's symmetric memory maps it; NVLink multicast, which that could use too, stays off: see launcher.rank_environment.
Knows nothing of models; what does not fit here goes through NCCL: see parallel.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

from worker_svc.kernels import exchange, exchange_blocks, exchange_rows

_WORD = 4  # bytes
_FEW = 1 << 17  # words: 512 KiB of values, 64 rows of 4,096 in bfloat16; more go as blocks
_MANY = 1 << 23  # words at a time, between two GPUs
_MANY_OF_SEVERAL = 1 << 18  # every rank sends all to all others: among several, NCCL's ring sends less
_ROWS = 512  # that are normed with their sums


class PeerMemory:
    """Collectives that are faster than NCCL's, for few values much so, and can be captured in CUDA graphs."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        """A collective itself: every rank makes one, none begins to use it before all have."""
        many = _MANY if size == 2 else _MANY_OF_SEVERAL
        self._mapped: list[Any] = []  # it stays so as long as these live
        self._few = self._inboxes(rank, _FEW, exchange.inbox_words(size, _FEW), exchange.BLOCK, device)
        self._many = self._inboxes(rank, many, exchange_blocks.inbox_words(size, many), exchange_blocks.BLOCK, device)
        rows = _ROWS * exchange_rows.MOST_WORDS.value
        words = exchange_rows.inbox_words(size, rows)
        self._rows = self._inboxes(
            rank, rows, words, exchange_rows.MOST_WORDS.value, device, exchange_rows.NOTHING.value
        )
        self._most = many * _WORD if size > 2 else math.inf
        self._pdl = torch.cuda.get_device_capability(device) >= (9, 0)
        torch.cuda.synchronize(device)
        dist.all_reduce(torch.zeros(1))  # the others may write once all inboxes are empty

    def _inboxes(
        self, rank: int, capacity: int, size: int, block: int, device: torch.device, full_of: int = 0
    ) -> exchange.Inboxes:
        inbox = _symmetric_memory.empty(size, dtype=torch.int32, device=device)
        assert dist.group.WORLD is not None, "the ranks have joined"
        handle = _symmetric_memory.rendezvous(inbox, dist.group.WORLD)
        self._mapped.append((inbox.fill_(full_of), handle))
        counts = torch.zeros(capacity // block, dtype=torch.int32, device=device)
        return exchange.Inboxes(rank, tuple(handle.buffer_ptrs), capacity, counts)

    def can_add(self, values: Tensor) -> bool:
        """Whether all_reduce takes them."""
        fits = _is_whole(values) and values.nbytes <= self._most
        return fits and values.dtype in (torch.bfloat16, torch.float32)

    def all_reduce(self, values: Tensor) -> None:
        """Sum over the ranks, in place, bit for bit the same on all."""
        if values.nbytes <= _FEW * _WORD:
            exchange.all_reduce(values, self._few, pdl=self._pdl)
            return
        for part in torch.split(values.view(-1), self._many.capacity * _WORD // values.element_size()):
            exchange_blocks.all_reduce_blocks(part, self._many, pdl=self._pdl)

    def can_norm(self, x: Tensor) -> bool:
        """Whether all_reduce_norm takes them."""
        fits = len(x) <= _ROWS and x[0].nbytes <= exchange_rows.MOST_WORDS.value * _WORD
        return fits and self.can_add(x)

    def all_reduce_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As all_reduce; gives the norm of the sums, [T, hidden]."""
        out = torch.empty_like(x)
        exchange_rows.all_reduce_rows(x, self._rows, exchange_rows.RowNorm(weight, eps), out=out, pdl=self._pdl)
        return out

    def can_gather(self, values: Tensor) -> bool:
        """Whether all_gather takes them."""
        return _is_whole(values) and values.nbytes <= _FEW * _WORD

    def all_gather(self, values: Tensor) -> Tensor:
        """[size, *values.shape]"""
        out = values.new_empty(len(self._few.addresses), *values.shape)
        exchange.all_gather(values, self._few, out=out, pdl=self._pdl)
        return out


def why_unreachable(size: int) -> str | None:
    """Why the first `size` GPUs of this host can't reach each other's memory; None: they can."""
    for device in range(size):
        for peer in range(size):
            if device != peer and not torch.cuda.can_device_access_peer(device, peer):
                return f"GPU {device} can't reach the memory of GPU {peer}"
    return None


def _is_whole(values: Tensor) -> bool:
    """Whether the values lie on a GPU as the kernels need it."""
    return values.is_cuda and values.is_contiguous() and values.nbytes % _WORD == 0
