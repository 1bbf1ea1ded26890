"""Runs plans on one rank: fold, forward, sample. Knows nothing of gRPC, epochs' leases or processes."""

from typing import Protocol

import torch
from torch import Tensor

from shared.types import StepPlan
from worker_svc.layers.attention import AttentionBackend, StepAttention
from worker_svc.layers.embedding import VocabParallelEmbedding
from worker_svc.layers.kv_cache import KVCache, LayerCache
from worker_svc.layers.sampler import SampledTokens, Sampler
from worker_svc.runner.batch import BatchState, StepInputs


class CausalModel(Protocol):
    """What the runner needs of a model family."""

    @property
    def head(self) -> VocabParallelEmbedding:
        """What gives the logits of hidden states."""

    def __call__(
        self, token_ids: Tensor, positions: Tensor, caches: list[LayerCache], attention: StepAttention
    ) -> Tensor:
        """[T] token ids and positions to hidden states, [T, hidden]."""


class ModelRunner:
    """One rank's model, K/V memory and batch state."""

    def __init__(
        self,
        model: CausalModel,
        cache: KVCache,
        batch: BatchState,
        attention: AttentionBackend,
        sampler: Sampler,
    ) -> None:
        self.model = model
        self.cache = cache
        self.batch = batch
        self.attention = attention
        self.sampler = sampler
        # Last sampled token of each slot. On the device: plans run ahead of results.
        self._last_tokens = torch.zeros(batch.limits.max_num_seqs, dtype=torch.int64)

    def open_epoch(self) -> None:
        """Drops all batch state; weights and K/V memory stay."""
        self.batch.reset()

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> SampledTokens:
        """Raises InvalidRequest for a plan that does not follow; after any error a new epoch must be opened."""
        inputs = self.batch.apply(plan)
        self.cache.zero(inputs.zeroed)
        if not len(inputs.token_ids):
            return SampledTokens(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool))
        hidden = self.forward(inputs)
        logits = self.model.head.logits(hidden[torch.from_numpy(inputs.sampling.last_index)])
        sampled = self.sampler(logits, inputs.sampling)
        self._last_tokens[torch.from_numpy(inputs.sampling.slots)] = sampled.token_ids
        return sampled

    def forward(self, inputs: StepInputs) -> Tensor:
        """Hidden states of the step's tokens, [T, hidden]; their K/V is stored."""
        token_ids = torch.from_numpy(inputs.token_ids)
        slots = torch.from_numpy(inputs.feedback_slots)
        token_ids[torch.from_numpy(inputs.feedback_index)] = self._last_tokens[slots]
        attention = self.attention.prepare(inputs)
        return self.model(token_ids, torch.from_numpy(inputs.positions), self.cache.layers, attention)
