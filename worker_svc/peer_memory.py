"""Memory that the GPUs of one group read and write in each other, and the collectives through it.

torch's symmetric memory maps it; NVLink multicast, which that could use too, stays off: see launcher.rank_environment.
Knows nothing of models; what does not fit here goes through NCCL: see parallel.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

from worker_svc.kernels import exchange

_CAPACITY = 1 << 19  # words: 2 MiB of values, 256 rows of 4,096 in bfloat16


class PeerMemory:
    """Collectives that are faster than NCCL's for the few rows of a decode step, and can be captured in CUDA graphs."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        """A collective itself: every rank makes one, none begins to use it before all have."""
        assert dist.group.WORLD is not None, "the ranks have joined"
        inbox = _symmetric_memory.empty(2 * size * _CAPACITY, dtype=torch.int64, device=device)
        handle = _symmetric_memory.rendezvous(inbox, dist.group.WORLD)
        inbox.zero_()
        torch.cuda.synchronize(device)
        dist.all_reduce(torch.zeros(1))  # the others may write once all inboxes are empty
        counts = torch.zeros(_CAPACITY // exchange.BLOCK, dtype=torch.int32, device=device)
        self._mapping = inbox, handle  # mapped as long as these live
        self._inboxes = exchange.Inboxes(rank, tuple(handle.buffer_ptrs), _CAPACITY, counts)
        self._pdl = torch.cuda.get_device_capability(device) >= (9, 0)

    def fits(self, values: Tensor) -> bool:
        """Whether the values are few enough, and lie as the kernels need it."""
        size = values.numel() * values.element_size()
        return values.is_cuda and values.is_contiguous() and size % 4 == 0 and size <= 4 * _CAPACITY

    def can_add(self, values: Tensor) -> bool:
        """Whether all_reduce takes them."""
        return self.fits(values) and values.dtype in (torch.bfloat16, torch.float32)

    def all_reduce(self, values: Tensor) -> None:
        """Sum over the ranks, in place, bit for bit the same on all."""
        exchange.all_reduce(values, self._inboxes, pdl=self._pdl)

    def all_gather(self, values: Tensor) -> Tensor:
        """[size, *values.shape]"""
        out = values.new_empty(len(self._inboxes.addresses), *values.shape)
        exchange.all_gather(values, self._inboxes, out=out, pdl=self._pdl)
        return out


def why_unreachable(size: int) -> str | None:
    """Why the first `size` GPUs of this host can't reach each other's memory; None: they can."""
    for device in range(size):
        for peer in range(size):
            if device != peer and not torch.cuda.can_device_access_peer(device, peer):
                return f"GPU {device} can't reach the memory of GPU {peer}"
    return None
