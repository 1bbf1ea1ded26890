"""Runs plans on one rank in plain torch, on any device: fold, forward, sample. The reference of the kernel runner.

Knows nothing of gRPC, epochs' leases or processes.
"""

from typing import Protocol

import torch
from torch import Tensor

from shared.types import IntArray, StepPlan
from worker_svc.layers.attention import ForwardInputs, TorchAttention
from worker_svc.layers.embedding import VocabParallelEmbedding
from worker_svc.layers.kv_cache import KVCache, LayerCache
from worker_svc.layers.sampler import SampledTokens, Sampler
from worker_svc.runner.batch import BatchState
from worker_svc.step_inputs import StepInputs


class CausalModel(Protocol):
    """What a runner needs of a model family."""

    @property
    def head(self) -> VocabParallelEmbedding:
        """What gives the logits of hidden states."""

    def __call__(self, inputs: ForwardInputs, caches: list[LayerCache]) -> Tensor:
        """Hidden states of T tokens, [T, hidden]."""


class PendingTokens(Protocol):
    """What a step samples, perhaps not yet."""

    def to_host(self) -> tuple[IntArray, IntArray]:
        """Token ids of the sampling rows in row order, and the indices of failed ones. Waits for them; call it once,
        from any thread."""


class Runner(Protocol):
    """One rank's model, K/V memory and batch state."""

    batch: BatchState
    cache: KVCache
    attention: str
    """What computes attention."""

    @property
    def padding(self) -> int:
        """Tokens computed so far that fill a graph's bucket and are nobody's."""

    @property
    def num_graphs(self) -> int:
        """CUDA graphs captured."""

    @property
    def graph_launches(self) -> int:
        """How often they were launched so far."""

    def open_epoch(self) -> None:
        """Drops all batch state once the running step has ended; weights and K/V memory stay."""

    def step(self, plan: StepPlan) -> PendingTokens:
        """Starts a step. Raises InvalidRequest for a plan that does not follow; after any error a new epoch must be
        opened."""


class TorchRunner:
    """See Runner. A step has ended when `step` returns, on a CPU."""

    attention = "torch"
    padding = num_graphs = graph_launches = 0

    def __init__(
        self, model: CausalModel, cache: KVCache, batch: BatchState, sampler: Sampler, device: torch.device
    ) -> None:
        self.model = model
        self.cache = cache
        self.batch = batch
        self.sampler = sampler
        self._device = device
        self._attention = TorchAttention(device)
        # Last sampled token of each slot. On the device: plans run ahead of results.
        self._last_tokens = torch.zeros(batch.limits.max_num_seqs, dtype=torch.int64, device=device)

    def open_epoch(self) -> None:
        """See Runner."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.batch.reset()

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> SampledTokens:
        """See Runner."""
        inputs = self.batch.apply(plan)
        self.cache.zero(inputs.zeroed)
        if not len(inputs.token_ids):
            return SampledTokens(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool))
        hidden = self.forward(inputs)
        logits = self.model.head.logits(hidden[torch.from_numpy(inputs.sampling.last_index).to(self._device)])
        sampled = self.sampler(logits, inputs.sampling)
        self._last_tokens[torch.from_numpy(inputs.sampling.slots).to(self._device)] = sampled.token_ids
        return sampled

    def forward(self, inputs: StepInputs) -> Tensor:
        """Hidden states of the step's tokens, [T, hidden]; their K/V is stored."""
        values = (inputs.token_ids, inputs.positions, inputs.slot_mapping)
        token_ids, positions, slot_mapping = (torch.from_numpy(value).to(self._device) for value in values)
        slots = torch.from_numpy(inputs.feedback_slots).to(self._device)
        token_ids[torch.from_numpy(inputs.feedback_index).to(self._device)] = self._last_tokens[slots]
        attention = self._attention.prepare(inputs)
        return self.model(ForwardInputs(token_ids, positions, slot_mapping, attention), self.cache.layers)
