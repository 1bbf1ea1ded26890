"""Root mean square layer normalisation (Zhang and Sennrich 2019)."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from worker_svc.layers.ops import Norm, Ops
from worker_svc.layers.shard import Shard, whole


def wide(dtype: torch.dtype) -> torch.dtype:
    """The format to compute norms, rotations and samples in: float64 stays, all else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""
    y = x.to(wide(x.dtype))
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


class RMSNorm(nn.Module):
    """The weight of one norm."""

    def __init__(self, size: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self._ops = ops

    @property
    def norm(self) -> Norm:
        """What fused operations take."""
        return Norm(self.weight, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        """[T, size], this rank's part of a sum, to [T, size]."""
        return self._ops.rms_norm(x, self.norm)

    def shards(self, name: str) -> Iterator[Shard]:
        """The weight, on every rank."""
        yield whole(f"{name}.weight", self.weight)
