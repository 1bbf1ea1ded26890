"""The router and the experts of one mixture-of-experts layer, and how they are split over the ranks.

Either every rank has a part of each expert's width, or whole experts; both give a part of a sum over the ranks. The
router is whole on every rank, so that all of them choose the same experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shared.moe_config import MoeConfig
from worker_svc.layers.ops import ExpertWeights, Norm, Ops, Routing
from worker_svc.layers.shard import Shard, whole
from worker_svc.parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class ExpertSplit:
    """This rank's experts [first, first + count), and of each of them the width [start, start + size)."""

    first: int
    count: int
    start: int
    size: int


def split_experts(moe: MoeConfig, group: TensorParallel, expert_parallel: bool) -> ExpertSplit:
    """An even split, of the experts or of their width."""
    if expert_parallel:
        assert moe.num_experts % group.size == 0
        count = moe.num_experts // group.size
        return ExpertSplit(group.rank * count, count, 0, moe.intermediate_size)
    assert moe.intermediate_size % group.size == 0
    size = moe.intermediate_size // group.size
    return ExpertSplit(0, moe.num_experts, group.rank * size, size)


class Router(nn.Module):
    """The weight that scores all experts for a token."""

    def __init__(self, num_experts: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))

    def shards(self, name: str) -> Iterator[Shard]:
        """The weight, on every rank."""
        yield whole(f"{name}.weight", self.weight)


class Experts(nn.Module):
    """down(silu(gate(x)) * up(x)) of many experts: this rank's, packed into two tensors."""

    def __init__(self, moe: MoeConfig, hidden_size: int, split: ExpertSplit, group: TensorParallel, ops: Ops) -> None:
        super().__init__()
        self._ops = ops
        self._moe = moe
        self._split = split
        self._group = group
        self.gate_up_proj = nn.Parameter(torch.empty(split.count, 2 * split.size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(split.count, hidden_size, split.size))

    def forward(self, x: Tensor, norm: Norm, router: Tensor, slot_mapping: Tensor) -> Tensor:
        """This rank's part of x + the weighted sum of the chosen experts of norm(x), [T, hidden]. `x`, a part too, may
        be overwritten.

        `router` [num_experts, hidden]; tokens whose slot is -1 are padding, which no expert computes.
        """
        routing = Routing(router, self._moe.experts_per_token, self._moe.norm_topk_prob)
        experts = ExpertWeights(self.gate_up_proj, self.down_proj, self._split.first)
        residual = x if self._group.rank == 0 else None
        return self._ops.norm_experts_add(x, norm, routing, experts, slot_mapping, residual)

    def shards(self, name: str) -> Iterator[Shard]:
        """Three matrices of each expert; of another rank's, which the checkpoint has too, no rows."""
        split, hidden = self._split, self.down_proj.shape[1]
        wide, narrow = (self._moe.intermediate_size, hidden), (hidden, self._moe.intermediate_size)
        for expert in range(self._moe.num_experts):
            here = split.first <= expert < split.first + split.count
            index, size = (expert - split.first, split.size) if here else (0, 0)
            gate, up = self.gate_up_proj[index].chunk(2)
            down, source = self.down_proj[index, :, :size], f"{name}.{expert}"
            yield Shard(f"{source}.gate_proj.weight", wide, gate[:size], start=split.start)
            yield Shard(f"{source}.up_proj.weight", wide, up[:size], start=split.start)
            yield Shard(f"{source}.down_proj.weight", narrow, down, dim=1, start=split.start)

    def fused_shards(self, name: str) -> Iterator[Shard]:
        """The same of two tensors for all experts, as transformers 5 holds and may store them."""
        split, hidden, width = self._split, self.down_proj.shape[1], self._moe.intermediate_size
        gate_up, down = (self._moe.num_experts, 2 * width, hidden), (self._moe.num_experts, hidden, width)
        if split.count < self._moe.num_experts:
            yield Shard(f"{name}.gate_up_proj", gate_up, self.gate_up_proj, start=split.first)
            yield Shard(f"{name}.down_proj", down, self.down_proj, start=split.first)
            return
        gate_rows, up_rows = self.gate_up_proj.chunk(2, dim=1)
        yield Shard(f"{name}.gate_up_proj", gate_up, gate_rows, dim=1, start=split.start)
        yield Shard(f"{name}.gate_up_proj", gate_up, up_rows, dim=1, start=width + split.start)
        yield Shard(f"{name}.down_proj", down, self.down_proj, dim=2, start=split.start)
