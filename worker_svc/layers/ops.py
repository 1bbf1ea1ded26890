"""The operations that a device may fuse, as layers see them: one implementation is chosen per device.

Everything else that layers compute is plain torch on every device. Knows nothing of models. What flows between layers
is each rank's part of a sum; a sum over the ranks is only needed where a norm comes next, so norms make it.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker_svc.layers.kv_cache import LayerCache


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm of a product's input."""

    weight: Tensor
    """[hidden]"""
    eps: float


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMSNorm of each query and key head."""

    query_weight: Tensor
    """[head_dim]"""
    key_weight: Tensor
    """[head_dim]"""
    eps: float


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are chosen: the `top_k` highest of softmax(x @ weight^T); among equals the first ones."""

    weight: Tensor
    """[num_experts, hidden]"""
    top_k: int
    renormalize: bool
    """Whether the probabilities of the chosen ones are scaled to a sum of 1."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """A rank's experts, or its part of each; those of other ranks add nothing here."""

    gate_up: Tensor
    """[experts here, 2 x width, hidden], the rows of gate first"""
    down: Tensor
    """[experts here, hidden, width]"""
    first: int
    """Index of the first one here among all."""


class Ops(Protocol):
    """Tensors of T tokens in, tensors of T tokens out. Arguments may be overwritten where a method says so. `x` before
    a norm is this rank's part of a sum over the ranks, which takes its place."""

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension, [T, hidden]."""

    def norm_linear(self, x: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[T, hidden] to [T, out_features]: rms_norm(x) @ weight^T + bias."""

    def norm_gated_linear(self, x: Tensor, norm: Norm, weight: Tensor) -> Tensor:
        """[T, hidden] to [T, intermediate]: silu(gate) * up, where [gate, up] = rms_norm(x) @ weight^T.

        `weight` [2 x intermediate, hidden], the rows of gate first.
        """

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """[T, in_features] to [T, out_features]: residual + x @ weight^T + bias; `residual` may be overwritten."""

    def norm_experts_add(
        self,
        x: Tensor,
        norm: Norm,
        routing: Routing,
        experts: ExpertWeights,
        slot_mapping: Tensor,
        residual: Tensor | None,
    ) -> Tensor:
        """[T, hidden]: residual + the sum of probability x down(silu(gate(y)) * up(y)) over a token's experts, where
        y = rms_norm(x); `residual`, which may be `x`, may be overwritten. Tokens of slot -1 need no expert."""

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
