"""Qwen3, the mixture-of-experts family (Qwen3MoeForCausalLM): models.qwen3 with experts in place of most MLPs."""

import torch
from torch import Tensor, nn

from shared.model_config import ModelConfig
from shared.moe_config import MoeConfig
from worker_svc.layers.attention import ForwardInputs
from worker_svc.layers.experts import Experts, Router, split_experts
from worker_svc.layers.ops import Norm, Ops
from worker_svc.models.qwen3 import Qwen3ForCausalLM, Qwen3MLP
from worker_svc.parallel import TensorParallel


class Qwen3MoeBlock(nn.Module):
    """A token's feed-forward is a weighted sum of the few experts that the router, here named gate, scores highest."""

    def __init__(
        self, moe: MoeConfig, hidden_size: int, group: TensorParallel, ops: Ops, expert_parallel: bool
    ) -> None:
        super().__init__()
        self.gate = Router(moe.num_experts, hidden_size)
        self.experts = Experts(moe, hidden_size, split_experts(moe, group, expert_parallel), group, ops)

    def forward(self, x: Tensor, norm: Norm, inputs: ForwardInputs) -> Tensor:
        """x + experts(norm(x)), [T, hidden]."""
        total: Tensor = self.experts(x, norm, self.gate.weight, inputs.slot_mapping)
        return total


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """The model and its LM head. Layers without experts are those of the dense family."""

    def __init__(
        self,
        config: ModelConfig,
        max_positions: int,
        dtype: torch.dtype,
        group: TensorParallel,
        ops: Ops,
        expert_parallel: bool,
    ) -> None:
        """`expert_parallel`: whether ranks have whole experts, in place of a part of each."""
        moe = config.moe
        assert moe is not None, "the configuration of this architecture has experts"

        def feed_forward(layer: int) -> nn.Module:
            if moe.is_sparse(layer):
                return Qwen3MoeBlock(moe, config.hidden_size, group, ops, expert_parallel)
            return Qwen3MLP(config, group, ops)

        super().__init__(config, max_positions, dtype, group, ops, feed_forward)
