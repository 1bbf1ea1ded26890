"""The ranks of one tensor-parallel group and their collectives. Knows nothing of plans, models or gRPC.

Values on the host travel through gloo, values on GPUs through memory that these reach in each other, else through NCCL.
Collectives on GPUs can be captured in CUDA graphs, if every rank captures and replays the same ones in the same order.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, ProcessGroupGloo, TCPStore

from shared.errors import StartupError, TandemError
from worker_svc.store import Store

if TYPE_CHECKING:
    from worker_svc.peer_memory import PeerMemory

_log = structlog.get_logger(__name__)

_FOREVER = timedelta(days=365)  # idle ranks wait in a collective; the launcher watches for hung ones
_TRIAL = timedelta(seconds=8)  # gloo gives ranks that connect five times as long
_FIRST = 4096  # bytes of the first part of a message: most plans fit, so that one broadcast carries them
_LENGTH = 8  # of them say how long it is


class RankLost(TandemError):
    """Another rank of the group has ended."""


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This process's place in its group. Every rank must call the same collectives in the same order."""

    rank: int = 0
    size: int = 1
    on_gpu: bool = False
    peers: "PeerMemory | None" = None
    """Of GPUs that reach each other's memory."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of rows [T, hidden] over the ranks, in place."""
        if self.size == 1:
            return x
        if self.peers is not None and self.peers.can_add(x):
            self.peers.all_reduce(x)
        else:
            dist.all_reduce(x)
        return x

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
        if self.peers is not None and self.peers.can_gather(values):
            return self.peers.all_gather(values)
        gathered = values.new_empty(self.size, *values.shape)
        dist.all_gather_into_tensor(gathered.view(-1), values.reshape(-1))
        return gathered

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
            start, rest = data[: _FIRST - _LENGTH], bytearray(data[_FIRST - _LENGTH :])
            first = bytearray(len(data).to_bytes(_LENGTH, "little") + start.ljust(_FIRST - _LENGTH))
            self.broadcast(torch.frombuffer(first, dtype=torch.uint8))
            if rest:
                self.broadcast(torch.frombuffer(rest, dtype=torch.uint8))

    def receive_bytes(self) -> bytes:
        """What rank 0 sends. Raises RankLost where it is gone."""
        try:
            first = self.broadcast(torch.empty(_FIRST, dtype=torch.uint8)).numpy().tobytes()
            length = int.from_bytes(first[:_LENGTH], "little")
            data = first[_LENGTH : _LENGTH + length]
            if length > len(data):
                data += self.broadcast(torch.empty(length - len(data), dtype=torch.uint8)).numpy().tobytes()
            return data
        except RuntimeError as error:  # how torch.distributed tells a closed connection
            raise RankLost(f"rank 0 is gone ({error})") from None

    def leave(self) -> None:
        """Nothing may be called afterwards. What GPUs and their graphs hold ends with the process."""
        if self.on_gpu:
            torch.cuda.synchronize()
            self.minimum(0)  # no rank ends while kernels of another one may write into its memory
        elif self.size > 1:
            dist.destroy_process_group()


ALONE = TensorParallel()


def join(rank: int, size: int, rendezvous: Path | Store, device: torch.device) -> TensorParallel:
    """Waits for all ranks of the group: at a file that those of one host share, or at a store that rank 0 serves.

    Raises StartupError where these don't fit each other, or don't reach each other.
    """
    if size == 1:
        return TensorParallel()
    on_gpu = device.type == "cuda"
    store: PrefixStore | FileStore
    if isinstance(rendezvous, Store):
        nnodes, store = rendezvous.nnodes, _connect(rendezvous, rank, size, device)
        _trial = _reach_all(store, rank, size)  # kept until no rank can be in the midst of its own
    else:
        nnodes, store = 1, FileStore(str(rendezvous), size)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=_FOREVER,
        device_id=device if on_gpu else None,  # connects NCCL now: a graph that is being captured could not
    )
    return TensorParallel(rank, size, on_gpu, _peers(rank, size, nnodes, device) if on_gpu else None)


def _connect(store: Store, rank: int, size: int, device: torch.device) -> PrefixStore:
    """Waits for all ranks. Rank 0, which has the listening socket, serves them. Raises StartupError where their devices
    differ: their first collective would never end."""
    connected = TCPStore(
        store.host,
        store.port,
        is_master=store.listener is not None,
        master_listen_fd=store.listener,
        timeout=_FOREVER,
        wait_for_workers=False,
    )
    own = PrefixStore(store.epoch, connected)
    own.set(f"device of rank {rank}", device.type)
    own.wait([f"device of rank {number}" for number in range(size)])
    if (first := own.get("device of rank 0").decode()) != device.type:
        raise StartupError(
            f"--device: rank 0 runs on {first}, rank {rank} on {device.type}: give the same to all nodes"
        )
    return own


def _reach_all(store: PrefixStore, rank: int, size: int) -> ProcessGroupGloo:
    """Connects all ranks, as the group will, which has no bound: it would wait for ever where a firewall is between
    nodes. Raises StartupError."""
    try:
        return ProcessGroupGloo(PrefixStore("trial", store), rank, size, _TRIAL)
    except RuntimeError as error:
        problem = str(error).rpartition("] ")[2]  # after the place in gloo's source
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "that of the host's name")
        raise StartupError(
            f"rank {rank} can't connect with the ranks of all nodes: let all TCP ports above 1024 pass between the "
            f"nodes, both ways, at the network interface {interface} (GLOO_SOCKET_IFNAME chooses another): {problem}"
        ) from None


def _peers(rank: int, size: int, nnodes: int, device: torch.device) -> "PeerMemory | None":
    """None, with a warning, where NCCL must do alone."""
    try:
        from worker_svc.peer_memory import PeerMemory, why_unreachable
    except ModuleNotFoundError as missing:
        problem: str | None = f"{missing}: pip install 'tandem-serve[gpu]'"
    else:
        problem = why_unreachable(size, nnodes)
        if problem is None:
            return PeerMemory(rank, size, device)
    if rank == 0:
        _log.warning("all collectives go through NCCL: those of small batches take longer", reason=problem)
    return None
