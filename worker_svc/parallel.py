"""The ranks of one tensor-parallel group and their collectives. Knows nothing of plans, models or gRPC."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shared.errors import TandemError

_FOREVER = timedelta(days=365)  # idle ranks wait in a collective; the launcher watches for hung ones


class RankLost(TandemError):
    """Another rank of the group has ended."""


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This process's place in its group. Every rank must call the same collectives in the same order."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values."""
        if self.size == 1:
            return value
        cell = torch.tensor([value])
        dist.all_reduce(cell, op=dist.ReduceOp.MIN)
        return int(cell)

    def all_gather(self, values: Tensor) -> Tensor:
        """[size, *values.shape]: every rank's values, on every rank."""
        if self.size == 1:
            return values[None]
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(gathered, values.contiguous())
        return torch.stack(gathered)

    def gather_to_first(self, values: Tensor) -> list[Tensor]:
        """Every rank's values in rank order on rank 0; an empty list elsewhere."""
        if self.size == 1:
            return [values]
        gathered = [torch.empty_like(values) for _ in range(self.size)] if self.rank == 0 else []
        dist.gather(values.contiguous(), gathered or None, dst=0)
        return gathered

    def broadcast(self, values: Tensor) -> Tensor:
        """Rank 0's values, in place."""
        if self.size > 1:
            dist.broadcast(values, src=0)
        return values

    def send_bytes(self, data: bytes) -> None:
        """From rank 0 to all others, which receive_bytes()."""
        if self.size > 1:
            self.broadcast(torch.tensor([len(data)]))
            self.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def receive_bytes(self) -> bytes:
        """What rank 0 sends, at least one byte. Raises RankLost where it is gone."""
        try:
            length = self.broadcast(torch.zeros(1, dtype=torch.int64))
            return self.broadcast(torch.empty(int(length), dtype=torch.uint8)).numpy().tobytes()
        except RuntimeError as error:  # how torch.distributed tells a closed connection
            raise RankLost(f"rank 0 is gone ({error})") from None

    def leave(self) -> None:
        """Ends the connections. Nothing may be called afterwards."""
        if self.size > 1:
            dist.destroy_process_group()


def join(rank: int, size: int, rendezvous: Path) -> TensorParallel:
    """Waits for all ranks of the group at a file that they share."""
    if size > 1:
        # gloo carries plans, which are bytes on the host; tensors on GPUs go through NCCL.
        backend = "cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "gloo"
        dist.init_process_group(
            backend, init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=_FOREVER
        )
    return TensorParallel(rank, size)
