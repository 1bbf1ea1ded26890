"""Linear layers split over the ranks. Beside embedding.py and experts.py nothing knows how parameters are split.

Megatron-LM's scheme (Shoeybi et al. 2019): the layers that widen are split by output, those that narrow by input, so
that attention and feed-forward need one sum over the ranks each, which the norm after it makes: see layers.ops.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from worker_svc.layers.ops import Norm, Ops
from worker_svc.layers.shard import Shard, sibling
from worker_svc.parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one checkpoint matrix that this rank keeps."""

    name: str
    total: int
    """Rows of the whole matrix."""
    start: int
    size: int


def split_part(name: str, total: int, group: TensorParallel) -> Part:
    """An even split."""
    assert total % group.size == 0
    size = total // group.size
    return Part(name, total, group.rank * size, size)


def kv_heads_per_rank(num_kv_heads: int, group: TensorParallel) -> int:
    """At least one: ranks beyond the number of K/V heads share them."""
    return max(1, num_kv_heads // group.size)


def qkv_parts(num_heads: int, num_kv_heads: int, head_dim: int, group: TensorParallel) -> list[Part]:
    """Query heads split evenly; each rank keeps the K/V heads that its query heads read."""
    kv_heads = kv_heads_per_rank(num_kv_heads, group)
    first = group.rank * num_kv_heads // group.size
    total = num_kv_heads * head_dim
    return [
        split_part("q_proj", num_heads * head_dim, group),
        Part("k_proj", total, first * head_dim, kv_heads * head_dim),
        Part("v_proj", total, first * head_dim, kv_heads * head_dim),
    ]


class ColumnParallelLinear(nn.Module):
    """One or more matrices split by output and packed into one: [T, in_features] to [T, this rank's outputs], after a
    norm of the input."""

    def __init__(self, in_features: int, parts: Sequence[Part], bias: bool, ops: Ops) -> None:
        super().__init__()
        self._ops = ops
        self.parts = parts
        self.sizes = [part.size for part in parts]
        self.weight = nn.Parameter(torch.empty(sum(self.sizes), in_features))
        self.bias = nn.Parameter(torch.empty(sum(self.sizes))) if bias else None

    def forward(self, x: Tensor, norm: Norm) -> Tensor:
        """[T, in_features] to [T, sum(sizes)]."""
        return self._ops.norm_linear(x, norm, self.weight, self.bias)

    def shards(self, name: str) -> Iterator[Shard]:
        """One shard per part and parameter."""
        start = 0
        for part in self.parts:
            rows = slice(start, start + part.size)
            source = sibling(name, part.name)
            yield Shard(f"{source}.weight", (part.total, self.weight.shape[1]), self.weight[rows], start=part.start)
            if self.bias is not None:
                yield Shard(f"{source}.bias", (part.total,), self.bias[rows], start=part.start)
            start += part.size


class GatedLinear(ColumnParallelLinear):
    """Two such matrices, gate and up: [T, in_features] to [T, this rank's outputs of one], silu(gate) * up."""

    def __init__(self, in_features: int, gate: Part, up: Part, ops: Ops) -> None:
        super().__init__(in_features, (gate, up), False, ops)

    def forward(self, x: Tensor, norm: Norm) -> Tensor:
        """[T, in_features] to [T, size of a part]."""
        return self._ops.norm_gated_linear(x, norm, self.weight)


class RowParallelLinear(nn.Module):
    """A matrix split by input: [T, this rank's inputs] to [T, out_features], a part of a sum over the ranks."""

    def __init__(self, in_features: int, out_features: int, bias: bool, group: TensorParallel, ops: Ops) -> None:
        super().__init__()
        self._ops = ops
        self.group = group
        self.part = split_part("", in_features, group)
        self.weight = nn.Parameter(torch.empty(out_features, self.part.size))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """This rank's part of residual + product. One rank adds the residual, which all have, and the bias: nothing is
        left to do after the sum over the ranks. `residual` [T, out_features] may be overwritten."""
        if self.group.rank == 0:
            return self._ops.linear_add(x, self.weight, residual, self.bias)
        return self._ops.linear_add(x, self.weight, None)

    def shards(self, name: str) -> Iterator[Shard]:
        """The columns of this rank, and the whole bias."""
        shape = (self.weight.shape[0], self.part.total)
        yield Shard(f"{name}.weight", shape, self.weight, dim=1, start=self.part.start)
        if self.bias is not None:
            yield Shard(f"{name}.bias", tuple(self.bias.shape), self.bias)
