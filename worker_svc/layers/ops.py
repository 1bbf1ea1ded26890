"""The operations that a device may fuse, as layers see them: one implementation is chosen per device.

Everything else that layers compute is plain torch on every device. Knows nothing of models and ranks.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker_svc.layers.kv_cache import LayerCache


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMSNorm of each query and key head."""

    query_weight: Tensor
    """[head_dim]"""
    key_weight: Tensor
    """[head_dim]"""
    eps: float


class Ops(Protocol):
    """Tensors of T tokens in, tensors of T tokens out. Arguments may be overwritten where a method says so."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[T, in_features] to [T, out_features]: x @ weight^T + bias."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and x + residual; both arguments may be overwritten."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 x intermediate] to [T, intermediate]: silu(gate) * up."""

    def rotation(self, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What rotate_and_store needs of the tables [positions, head_dim / 2] in every layer, once per step."""

    def rotate_and_store(
        self,
        qkv: Tensor,
        norm: QKNorm | None,
        rotation: tuple[Tensor, Tensor, Tensor],
        slot_mapping: Tensor,
        cache: LayerCache,
    ) -> Tensor:
        """Norms and rotates queries and keys; stores keys and values where the slot mapping says, not at all at -1.

        `qkv` [T, (num_heads + 2 x num_kv_heads) x head_dim], which may be overwritten. Gives the queries,
        [T, num_heads, head_dim].
        """
