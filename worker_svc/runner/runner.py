"""Runs plans on one rank in plain torch, on any device: fold, forward, sample. The reference of the kernel runner.

Knows nothing of gRPC, epochs' leases or processes.
"""

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from shared.types import StepPlan
from worker_svc.layers.attention import ForwardInputs, TorchAttention
from worker_svc.layers.embedding import VocabParallelEmbedding
from worker_svc.layers.kv_cache import KVCache, LayerCache
from worker_svc.layers.sampler import SampledTokens
from worker_svc.layers.transfer import to_device
from worker_svc.runner.batch import BatchState
from worker_svc.runner.outcome import NO_LOGPROBS, Outcome, StepLogprobs, StepTokens
from worker_svc.runner.row_sampler import RowSampler, logged_rows
from worker_svc.step_inputs import LongArray, SamplingInputs, StepInputs


class CausalModel(Protocol):
    """What a runner needs of a model family."""

    @property
    def head(self) -> VocabParallelEmbedding:
        """What gives the logits of hidden states."""

    def __call__(self, inputs: ForwardInputs, caches: list[LayerCache]) -> Tensor:
        """Hidden states of T tokens, [T, hidden]."""


class PendingTokens(Protocol):
    """What a step gives, perhaps not yet."""

    def to_host(self) -> StepTokens:
        """Waits for it. Once, in the order of the steps, from any one thread."""


class PlanRunner(Protocol):
    """What runs the plans of an epoch."""

    def open_epoch(self) -> None:
        """Drops all batch state once the running step has ended; weights and K/V memory stay."""

    def step(self, plan: StepPlan) -> PendingTokens:
        """Starts a step. Raises InvalidRequest for a plan that does not follow; after any error a new epoch must be
        opened."""


class Runner(PlanRunner, Protocol):
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


class TorchRunner:
    """See Runner. A step has ended when `step` returns, on a CPU."""

    attention = "torch"
    padding = num_graphs = graph_launches = 0

    def __init__(
        self, model: CausalModel, cache: KVCache, batch: BatchState, sampler: RowSampler, device: torch.device
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
        self.sampler.prompts.reset()

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> Outcome:
        """See Runner."""
        rows = self.batch.fold(plan)
        self.cache.zero(rows.zeroed)
        self.sampler.begin(plan.admitted, rows)
        if not len(rows.slots):
            nothing = SampledTokens(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool))
            return Outcome(nothing, NO_LOGPROBS)
        inputs = self.batch.inputs(rows)
        hidden = self.forward(inputs)
        prompt = self.sampler.prompts.compute(self.sampler.prompts.chunks(rows), hidden)
        sampled, logprobs = self._sample(hidden, inputs.sampling)
        return Outcome(sampled, replace(logprobs, prompt=prompt))

    def _sample(self, hidden: Tensor, sampling: SamplingInputs) -> tuple[SampledTokens, StepLogprobs]:
        logits = self.model.head.logits(hidden[self._to_device(sampling.last_index)])
        sampled = self.sampler.sample(logits, torch.arange(len(logits), device=self._device), sampling)
        self._last_tokens[self._to_device(sampling.slots)] = sampled.token_ids
        logged = logged_rows(sampling)
        rows = self._to_device(logged)
        return sampled, self.sampler.logprobs(logits, rows, sampled.token_ids[rows], sampling.logprobs[logged])

    def forward(self, inputs: StepInputs) -> Tensor:
        """Hidden states of the step's tokens, [T, hidden]; their K/V is stored."""
        values = (inputs.token_ids, inputs.positions, inputs.slot_mapping)
        token_ids, positions, slot_mapping = (self._to_device(value) for value in values)
        token_ids[self._to_device(inputs.feedback_index)] = self._last_tokens[self._to_device(inputs.feedback_slots)]
        attention = self._attention.prepare(inputs)
        return self.model(ForwardInputs(token_ids, positions, slot_mapping, attention), self.cache.layers)

    def _to_device(self, values: LongArray) -> Tensor:
        return to_device(values, self._device)
