"""Root mean square layer normalisation (Zhang and Sennrich 2019)."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from worker_svc.layers.shard import Shard, whole


def wide(dtype: torch.dtype) -> torch.dtype:
    """The format to compute norms, rotations and samples in: float64 stays, all else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to [..., size]."""
        y = x.to(wide(x.dtype))
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and x + residual."""
        residual = x + residual
        return self(residual), residual

    def shards(self, name: str) -> Iterator[Shard]:
        """The weight, on every rank."""
        yield whole(f"{name}.weight", self.weight)
