"""Memory that the GPUs of one group read and write in each other, and the collectives through it.

torch's symmetric memory maps it; NVLink multicast, which that could use too, stays off: see environment.
Knows nothing of models; what does not fit here goes through NCCL: see parallel.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

from worker_svc.kernels import exchange, exchange_rows

_WORD = 4  # bytes
_FEW = 1 << 15  # most words of an all-reduce that travel with their number: 16 rows of 4,096 values in bfloat16
_GATHERED = 1 << 17  # most words of an all-gather
_ROWS = 4096  # at a time, between two GPUs
_ROWS_OF_SEVERAL = 128  # every rank sends all to all others: among several, NCCL's ring sends less


class PeerMemory:
    """Collectives that are faster than NCCL's, for few values much so, and can be captured in CUDA graphs."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        """A collective itself: every rank makes one, none begins to use it before all have."""
        self._mapped: list[Any] = []  # it stays so as long as these live
        self._few = self._inboxes(rank, _GATHERED, exchange.inbox_words(size, _GATHERED), exchange.BLOCK, 0, device)
        self._at_a_time = _ROWS if size == 2 else _ROWS_OF_SEVERAL
        self._most_rows = math.inf if size == 2 else _ROWS_OF_SEVERAL
        width, full_of = exchange_rows.MOST_WORDS.value, exchange_rows.NOTHING.value
        capacity = self._at_a_time * width
        self._rows = self._inboxes(rank, capacity, exchange_rows.inbox_words(size, capacity), width, full_of, device)
        self._pdl = torch.cuda.get_device_capability(device) >= (9, 0)
        torch.cuda.synchronize(device)
        dist.all_reduce(torch.zeros(1))  # the others may write once all inboxes are empty

    def _inboxes(
        self, rank: int, capacity: int, size: int, block: int, full_of: int, device: torch.device
    ) -> exchange.Inboxes:
        inbox = _symmetric_memory.empty(size, dtype=torch.int32, device=device)
        assert dist.group.WORLD is not None, "the ranks have joined"
        handle = _symmetric_memory.rendezvous(inbox, dist.group.WORLD)
        self._mapped.append((inbox.fill_(full_of), handle))
        counts = torch.zeros(capacity // block, dtype=torch.int32, device=device)
        return exchange.Inboxes(rank, tuple(handle.buffer_ptrs), capacity, counts)

    def can_add(self, x: Tensor) -> bool:
        """Whether all_reduce and all_reduce_norm take x, [T, hidden]."""
        width = x.shape[1] * x.element_size()
        fits = len(x) <= self._most_rows and width % _WORD == 0 and width <= exchange_rows.MOST_WORDS.value * _WORD
        return fits and x.is_cuda and x.is_contiguous() and x.dtype in (torch.bfloat16, torch.float32)

    def all_reduce(self, x: Tensor) -> None:
        """Sum over the ranks, in place, bit for bit the same on all."""
        if x.nbytes <= _FEW * _WORD:
            exchange.all_reduce(x, self._few, pdl=self._pdl)
            return
        for rows in torch.split(x, self._at_a_time):
            exchange_rows.all_reduce_rows(rows, self._rows, pdl=self._pdl)

    def all_reduce_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As all_reduce; gives the norm of the sums, [T, hidden]."""
        out, norm, most = torch.empty_like(x), exchange_rows.RowNorm(weight, eps), self._at_a_time
        for rows, normed in zip(torch.split(x, most), torch.split(out, most), strict=True):
            exchange_rows.all_reduce_rows(rows, self._rows, norm, out=normed, pdl=self._pdl)
        return out

    def can_gather(self, values: Tensor) -> bool:
        """Whether all_gather takes them."""
        whole = values.is_cuda and values.is_contiguous() and values.nbytes % _WORD == 0
        return whole and values.nbytes <= _GATHERED * _WORD

    def all_gather(self, values: Tensor) -> Tensor:
        """[size, *values.shape]"""
        out = values.new_empty(len(self._few.addresses), *values.shape)
        exchange.all_gather(values, self._few, out=out, pdl=self._pdl)
        return out


def why_unreachable(size: int, nnodes: int) -> str | None:
    """Why the GPUs of `size` ranks, the first ones of this host, can't reach each other's memory; None: they can."""
    if nnodes > 1:
        return f"the ranks are on {nnodes} nodes"
    for device in range(size):
        for peer in range(size):
            if device != peer and not torch.cuda.can_device_access_peer(device, peer):
                return f"GPU {device} can't reach the memory of GPU {peer}"
    return None
