"""The mixture-of-experts part of a config.json. Needs no torch, as model_config."""

from dataclasses import dataclass
from typing import Any

from shared.json_config import count


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Feed-forward layers that send each token to a few of many experts (Shazeer et al. 2017)."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Width of one expert."""
    norm_topk_prob: bool
    """Whether the weights of a token's experts are scaled to a sum of 1."""
    sparse_step: int
    dense_layers: frozenset[int]

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer, counted from 0, has experts: every `sparse_step`-th does, `dense_layers` left out."""
        return (layer + 1) % self.sparse_step == 0 and layer not in self.dense_layers


def moe_config(config: dict[str, Any], num_layers: int) -> MoeConfig:
    """Raises KeyError for what is missing, ValueError for a value out of its bounds.

    transformers 4 writes `num_experts`, 5 `num_local_experts`.
    """
    num_experts = count(config, "num_local_experts" if "num_local_experts" in config else "num_experts")
    per_token = count(config, "num_experts_per_tok")
    if per_token > num_experts:
        raise ValueError(f"num_experts_per_tok {per_token} is more than there are experts, {num_experts}")
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=per_token,
        intermediate_size=count(config, "moe_intermediate_size"),
        norm_topk_prob=_flag(config, "norm_topk_prob"),
        sparse_step=count(config, "decoder_sparse_step") if "decoder_sparse_step" in config else 1,
        dense_layers=_layers(config, "mlp_only_layers", num_layers),
    )


def _flag(config: dict[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if type(value) is not bool:
        raise ValueError(f"{key} {value!r} is neither true nor false")
    return value


def _layers(config: dict[str, Any], key: str, num_layers: int) -> frozenset[int]:
    layers = config.get(key) or []
    if not isinstance(layers, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in layers):
        raise ValueError(f"{key} {layers!r} is no list of layers from 0 to {num_layers - 1}")
    return frozenset(layers)
