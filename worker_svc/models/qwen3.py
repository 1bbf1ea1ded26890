"""Qwen3, the dense family (Qwen3ForCausalLM): pre-norm decoder, grouped-query attention with QK norm, SwiGLU.

Pure computation: tensors in, tensors out. K/V memory and the step's attention are arguments. What flows from layer to
layer, `x`, is each rank's part of a sum: see layers.ops.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shared.model_config import ModelConfig
from worker_svc.layers.attention import ForwardInputs
from worker_svc.layers.embedding import VocabParallelEmbedding
from worker_svc.layers.kv_cache import LayerCache
from worker_svc.layers.linear import ColumnParallelLinear, GatedLinear, RowParallelLinear, qkv_parts, split_part
from worker_svc.layers.norm import RMSNorm
from worker_svc.layers.ops import Norm, Ops, QKNorm
from worker_svc.layers.rotary import RotaryEmbedding
from worker_svc.parallel import TensorParallel


class Qwen3Attention(nn.Module):
    """Grouped-query attention of the query heads that this rank has."""

    def __init__(self, config: ModelConfig, group: TensorParallel, ops: Ops) -> None:
        super().__init__()
        self._ops = ops
        parts = qkv_parts(config.num_heads, config.num_kv_heads, config.head_dim, group)
        self.qkv_proj = ColumnParallelLinear(config.hidden_size, parts, config.attention_bias, ops)
        heads_size = config.num_heads * config.head_dim
        self.o_proj = RowParallelLinear(heads_size, config.hidden_size, config.attention_bias, group, ops)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, ops) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, ops) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,
        norm: Norm,
        rotation: tuple[Tensor, Tensor, Tensor],
        cache: LayerCache,
        inputs: ForwardInputs,
    ) -> Tensor:
        """x + attention(norm(x)), [T, hidden]."""
        qk_norm = None
        if self.q_norm is not None and self.k_norm is not None:
            qk_norm = QKNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        query = self._ops.rotate_and_store(self.qkv_proj(x, norm), qk_norm, rotation, inputs.slot_mapping, cache)
        total: Tensor = self.o_proj(inputs.attention(query, cache).flatten(1), residual=x)
        return total


class Qwen3MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, group: TensorParallel, ops: Ops) -> None:
        super().__init__()
        gate, up = (split_part(name, config.intermediate_size, group) for name in ("gate_proj", "up_proj"))
        self.gate_up_proj = GatedLinear(config.hidden_size, gate, up, ops)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, False, group, ops)

    def forward(self, x: Tensor, norm: Norm, inputs: ForwardInputs) -> Tensor:
        """x + mlp(norm(x)), [T, hidden]. Of the inputs only experts make use, which must know the padding."""
        total: Tensor = self.down_proj(self.gate_up_proj(x, norm), residual=x)
        return total


class Qwen3DecoderLayer(nn.Module):
    """Attention and feed-forward, each after a norm and beside a residual."""

    def __init__(self, config: ModelConfig, mlp: nn.Module, group: TensorParallel, ops: Ops) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.self_attn = Qwen3Attention(config, group, ops)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.mlp = mlp

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor, Tensor], cache: LayerCache, inputs: ForwardInputs
    ) -> Tensor:
        """[T, hidden] to [T, hidden]; `x` may be overwritten."""
        x = self.self_attn(x, self.input_layernorm.norm, rotation, cache, inputs)
        total: Tensor = self.mlp(x, self.post_attention_layernorm.norm, inputs)
        return total


class Qwen3Model(nn.Module):
    """Embedding, decoder layers, final norm."""

    def __init__(
        self,
        config: ModelConfig,
        max_positions: int,
        dtype: torch.dtype,
        group: TensorParallel,
        ops: Ops,
        feed_forward: Callable[[int], nn.Module],
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocabulary_size, config.hidden_size, group)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, max_positions, dtype)
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(config, feed_forward(layer), group, ops) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self._ops = ops

    def forward(self, inputs: ForwardInputs, caches: list[LayerCache]) -> Tensor:
        """[T, hidden] of T tokens."""
        x = self.embed_tokens(inputs.token_ids)
        rotation = self._ops.rotation(self.rotary.cos, self.rotary.sin, inputs.positions)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, rotation, cache, inputs)
        normed: Tensor = self.norm(x)
        return normed


class Qwen3ForCausalLM(nn.Module):
    """The model and its LM head, which a tied model shares with the embedding."""

    def __init__(
        self,
        config: ModelConfig,
        max_positions: int,
        dtype: torch.dtype,
        group: TensorParallel,
        ops: Ops,
        feed_forward: Callable[[int], nn.Module] | None = None,
    ) -> None:
        """`feed_forward` makes that of each layer, counted from 0; None: Qwen3MLP."""
        super().__init__()
        feed_forward = feed_forward or (lambda _: Qwen3MLP(config, group, ops))
        self.model = Qwen3Model(config, max_positions, dtype, group, ops, feed_forward)
        if not config.tie_embeddings:
            self.lm_head = VocabParallelEmbedding(config.vocabulary_size, config.hidden_size, group)
        self.tied = config.tie_embeddings

    @property
    def head(self) -> VocabParallelEmbedding:
        """What gives the logits."""
        return self.model.embed_tokens if self.tied else self.lm_head

    def forward(self, inputs: ForwardInputs, caches: list[LayerCache]) -> Tensor:
        """Hidden states of T tokens, [T, hidden]."""
        hidden: Tensor = self.model(inputs, caches)
        return hidden
