"""layers.ops in plain torch: any device, any number format. The reference of the kernels."""

import torch
from torch import Tensor
from torch.nn import functional

from worker_svc.layers.kv_cache import LayerCache
from worker_svc.layers.norm import normalize, wide
from worker_svc.layers.ops import ExpertWeights, Norm, QKNorm, Routing
from worker_svc.layers.rotary import rotate
from worker_svc.parallel import ALONE, TensorParallel


class TorchOps:
    """See layers.ops.Ops."""

    def __init__(self, group: TensorParallel = ALONE) -> None:
        self._group = group

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """See Ops."""
        return normalize(self._group.all_reduce(x), norm.weight, norm.eps)

    def norm_linear(self, x: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See Ops."""
        return functional.linear(self.rms_norm(x, norm), weight, bias)

    def norm_gated_linear(self, x: Tensor, norm: Norm, weight: Tensor) -> Tensor:
        """See Ops."""
        gate, up = self.norm_linear(x, norm, weight).chunk(2, dim=-1)
        return functional.silu(gate) * up

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """See Ops."""
        product = functional.linear(x, weight, bias)
        return product if residual is None else residual + product

    def norm_experts_add(
        self,
        x: Tensor,
        norm: Norm,
        routing: Routing,
        experts: ExpertWeights,
        slot_mapping: Tensor,
        residual: Tensor | None,
    ) -> Tensor:
        """See Ops: one chosen expert after another."""
        y = self.rms_norm(x, norm)
        probabilities, chosen = route(y, routing)
        chosen = chosen - experts.first
        here = (slot_mapping >= 0)[:, None] & (chosen >= 0) & (chosen < len(experts.down))
        total = torch.zeros_like(y) if residual is None else residual.clone()
        for index in torch.unique(chosen[here]).tolist():
            tokens, places = (here & (chosen == index)).nonzero(as_tuple=True)
            gate, up = functional.linear(y[tokens], experts.gate_up[index]).chunk(2, dim=-1)
            out = functional.linear(functional.silu(gate) * up, experts.down[index])
            total.index_add_(0, tokens, out * probabilities[tokens, places, None])
        return total

    def rotation(self, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """cos and sin, [T, 1, head_dim / 2] each."""
        return cos[positions][:, None], sin[positions][:, None], positions

    def rotate_and_store(
        self,
        qkv: Tensor,
        norm: QKNorm | None,
        rotation: tuple[Tensor, Tensor, Tensor],
        slot_mapping: Tensor,
        cache: LayerCache,
    ) -> Tensor:
        """See Ops."""
        kv_heads, dim = cache.key.shape[2:]
        heads = qkv.view(len(qkv), -1, dim)
        query, key, value = heads[:, : -2 * kv_heads], heads[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:]
        if norm is not None:
            query = normalize(query, norm.query_weight, norm.eps)
            key = normalize(key, norm.key_weight, norm.eps)
        cos, sin, _ = rotation
        stored = (slot_mapping >= 0).nonzero()[:, 0]
        for new, memory in ((rotate(key, cos, sin), cache.key), (value, cache.value)):
            memory.flatten(0, 1).index_copy_(0, slot_mapping[stored], new[stored])
        return rotate(query, cos, sin)


def route(y: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Probabilities and indices of each token's experts, [T, top_k] each."""
    logits = functional.linear(y, routing.weight)
    probabilities = logits.softmax(-1, dtype=wide(logits.dtype))
    best, chosen = probabilities.sort(dim=-1, descending=True, stable=True)
    best, chosen = best[:, : routing.top_k], chosen[:, : routing.top_k]
    if routing.renormalize:
        best = best / best.sum(-1, keepdim=True)
    return best.to(y.dtype), chosen
