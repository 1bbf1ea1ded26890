"""layers.ops as fused Triton kernels, for bfloat16 and float32 on an NVIDIA GPU."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from worker_svc.kernels import rope
from worker_svc.kernels.activation import silu_and_mul
from worker_svc.kernels.expert_gemv import gated_products_of_one, weighted_sum_of_one
from worker_svc.kernels.experts import experts_add
from worker_svc.kernels.fused_linear import fused_linear, is_faster
from worker_svc.kernels.gemv import gemv
from worker_svc.kernels.norm import rms_norm
from worker_svc.kernels.router import router_product_of_one
from worker_svc.kernels.routing import Choice, norm_route
from worker_svc.kernels.tiled_linear import is_faster_in_tiles, tiled_linear
from worker_svc.layers.kv_cache import LayerCache
from worker_svc.layers.ops import ExpertWeights, Norm, QKNorm, Routing
from worker_svc.parallel import ALONE, TensorParallel


def prefer_cublaslt() -> None:
    """For all products of this process that no kernel here takes: its choices for 33 to 256 rows are on the whole
    faster than cuBLAS's, for more as fast. Torch warns that it is told so."""
    torch.backends.cuda.preferred_blas_library("cublaslt")


class TritonOps:
    """See layers.ops.Ops."""

    def __init__(self, pdl: bool, group: TensorParallel = ALONE) -> None:
        """`pdl` launches kernels before the one ahead has ended: compute capability 9.0 and newer."""
        self._pdl = pdl
        self._group = group

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """See Ops: one kernel where the GPUs reach each other's memory."""
        peers = self._group.peers
        if peers is not None and peers.can_add(x):
            return peers.all_reduce_norm(x, norm.weight, norm.eps)
        self._group.all_reduce(x)
        out = torch.empty_like(x)
        rms_norm(x, norm.weight, norm.eps, out=out, pdl=self._pdl)
        return out

    def norm_linear(self, x: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See Ops."""
        product = self._few_rows(x, normed=True)
        if product is not None:
            self._group.all_reduce(x)
            return product(x, weight, bias, norm_weight=norm.weight, eps=norm.eps, pdl=self._pdl)
        y = self.rms_norm(x, norm)
        if is_faster_in_tiles(y, weight):
            return tiled_linear(y, weight, bias, pdl=self._pdl)
        return functional.linear(y, weight, bias)

    def norm_gated_linear(self, x: Tensor, norm: Norm, weight: Tensor) -> Tensor:
        """See Ops."""
        product = self._few_rows(x, normed=True)
        if product is not None:
            self._group.all_reduce(x)
            return product(x, weight, norm_weight=norm.weight, eps=norm.eps, gated=True, pdl=self._pdl)
        y = self.rms_norm(x, norm)
        if is_faster_in_tiles(y, weight, gated=True):
            return tiled_linear(y, weight, gated=True, pdl=self._pdl)
        out = x.new_empty(len(x), len(weight) // 2)
        silu_and_mul(functional.linear(y, weight), out=out, pdl=self._pdl)
        return out

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """See Ops: the residual becomes the sum."""
        product = self._few_rows(x, normed=False)
        if product is not None:
            return product(x, weight, bias, residual=residual, pdl=self._pdl)
        if is_faster_in_tiles(x, weight):
            return tiled_linear(x, weight, bias, residual=residual, pdl=self._pdl)
        if residual is None:
            return functional.linear(x, weight, bias)
        residual.addmm_(x, weight.t())
        return residual if bias is None else residual.add_(bias)

    def norm_experts_add(
        self,
        x: Tensor,
        norm: Norm,
        routing: Routing,
        experts: ExpertWeights,
        slot_mapping: Tensor,
        residual: Tensor | None,
    ) -> Tensor:
        """See Ops: matrix-vector products for one token, grouped products for more. The residual becomes the sum."""
        weight, eps, pdl = norm.weight, norm.eps, self._pdl
        self._group.all_reduce(x)
        choice = Choice(routing.top_k, routing.renormalize, experts.first, len(experts.gate_up))
        if len(x) == 1:
            y, logits = router_product_of_one(x, weight, eps, routing.weight, pdl=pdl)
            activated = gated_products_of_one(y, logits, experts.gate_up, choice, pdl=pdl)
            return weighted_sum_of_one(activated, experts.down, logits, choice, residual, pdl=pdl)
        y, routed = norm_route(x, weight, eps, routing.weight, slot_mapping, choice, pdl=pdl)
        num_experts = len(routing.weight)
        return experts_add(y, routed, experts.gate_up, experts.down, residual, num_experts=num_experts, pdl=pdl)

    def _few_rows(self, x: Tensor, *, normed: bool) -> Callable[..., Tensor] | None:
        """The kernel for one row or for few, with a norm or with a residual inside; None: others are faster."""
        if len(x) == 1:
            return gemv
        return fused_linear if is_faster(x, normed=normed) else None

    def rotation(self, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tables themselves: the kernel looks up what it needs."""
        return cos, sin, positions

    def rotate_and_store(
        self,
        qkv: Tensor,
        norm: QKNorm | None,
        rotation: tuple[Tensor, Tensor, Tensor],
        slot_mapping: Tensor,
        cache: LayerCache,
    ) -> Tensor:
        """See Ops. The queries are a view of `qkv`."""
        cos, sin, positions = rotation
        kernel_norm = None if norm is None else rope.QKNorm(norm.query_weight, norm.key_weight, norm.eps)
        rope.rotate_and_store(
            qkv, positions, slot_mapping, cos, sin, kernel_norm, cache.key, cache.value, pdl=self._pdl
        )
        kv_heads, dim = cache.key.shape[2:]
        return qkv.view(len(qkv), -1, dim)[:, : -2 * kv_heads]
