"""Runs plans on one GPU: folds them on the host, sends what changed, launches, and does not wait.

The host's batch state checks plans and knows what the device holds; steps follow each other on the device without it.
"""

from dataclasses import dataclass

import numpy as np
import torch

from shared.types import IntArray, StepPlan
from worker_svc.kernels.candidates import MAX_TOP_K
from worker_svc.kernels.scatter import scatter
from worker_svc.layers.attention import TorchAttention
from worker_svc.layers.kv_cache import KVCache
from worker_svc.layers.sampler import Sampler
from worker_svc.runner.batch import BatchState
from worker_svc.runner.device_state import MAX_SUPPRESSED, DeviceState
from worker_svc.runner.lanes import Lanes, LaneTokens
from worker_svc.runner.programs import Programs
from worker_svc.runner.runner import PendingTokens
from worker_svc.runner.step_kernels import GpuAttention, StepKernels
from worker_svc.step_inputs import LongArray, SamplingInputs, StepInputs


@dataclass(frozen=True, slots=True)
class NoTokens:
    """Of a plan that changes nothing. See runner.PendingTokens."""

    def to_host(self) -> tuple[IntArray, IntArray]:
        """Nothing."""
        return np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32)


class KernelRunner:
    """See runner.Runner."""

    def __init__(
        self,
        attention: GpuAttention,
        cache: KVCache,
        batch: BatchState,
        state: DeviceState,
        kernels: StepKernels,
        programs: Programs,
        sampler: Sampler,
        lanes: Lanes,
    ) -> None:
        self.attention = attention.name
        self.cache = cache
        self.batch = batch
        self._state = state
        self._kernels = kernels
        self._programs = programs
        self._sampler = sampler
        self._lanes = lanes
        self._device = state.values.device
        self._torch_attention = TorchAttention(self._device)
        self._flash = attention.flash is not None

    def open_epoch(self) -> None:
        """See Runner."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.batch.reset()
        self._state.drop_changes()

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> PendingTokens:
        """See Runner. It has begun when this returns."""
        inputs = self.batch.apply(plan)
        self.cache.zero(inputs.zeroed)
        self._state.admit(plan.admitted)
        self._state.grow(*inputs.grown.T)
        bucket = self._stage_rows(inputs)
        changes = self._state.take_changes()
        if bucket is None and changes is None:
            return NoTokens()
        lane = self._lanes.take()
        try:
            if changes is not None:
                scatter(lane.upload(changes), out=self._state.values)
            if bucket is not None:
                self._launch(inputs, bucket)
                self._sample_others(inputs)
            lane.download(self._kernels.sampled)
        except BaseException:
            self._lanes.give_back(lane)
            raise
        return LaneTokens(lane, self._lanes, inputs.sampling_rows)

    def _stage_rows(self, inputs: StepInputs) -> tuple[int, int] | None:
        """What the device must know of the rows. Gives the tokens and rows of the step; None: there are none."""
        tokens, rows = len(inputs.token_ids), len(inputs.slots)
        if not rows:
            return None
        self._state.set_rows(inputs.slots)
        if inputs.decodes:
            return tokens, self._programs.decode_size(rows)
        rows = self._programs.decode_size(rows)
        bucket = self._programs.mixed_size(tokens, rows) if self._flash else (tokens, rows)
        known = inputs.token_ids.astype(np.int32)
        known[inputs.feedback_index] = -1
        self._state.set_tokens(inputs.starts, inputs.cu_seqlens, known, bucket[1])
        return bucket

    def _launch(self, inputs: StepInputs, bucket: tuple[int, int]) -> None:
        if inputs.decodes:
            self._programs.decode(bucket[1])
        elif self._flash:
            self._programs.mixed(bucket)
        else:
            self._kernels.mixed(*bucket, self._torch_attention.prepare(inputs))
        narrow = inputs.sampling.filtered & (inputs.sampling.top_k <= MAX_TOP_K)
        self._programs.sample(bucket[1], narrow=bool(narrow.any()))

    def _sample_others(self, inputs: StepInputs) -> None:
        """Rows that sample in a way that the kernels don't know take their tokens from torch."""
        others = _others(inputs.sampling)
        if not len(others):
            return
        rows = torch.from_numpy(inputs.sampling_rows[others]).to(self._device)
        slots = torch.from_numpy(inputs.sampling.slots[others]).to(self._device)
        sampled = self._sampler(self._kernels.logits[rows], inputs.sampling.select(others))
        tokens = sampled.token_ids.int()
        self._kernels.sampled[:, rows] = torch.stack((tokens, sampled.failed.int()))
        self._state.slots.last_tokens[slots] = tokens


def _others(sampling: SamplingInputs) -> LongArray:
    """The sampling rows that need a whole distribution, a mask, or more suppressed tokens than the kernels know."""
    other = sampling.filtered & ~((sampling.top_k > 0) & (sampling.top_k <= MAX_TOP_K))
    other[[row for row, _ in sampling.masks]] = True
    if len(sampling.suppressed):
        other |= np.bincount(sampling.suppressed[:, 0], minlength=len(other)) > MAX_SUPPRESSED
    rows: LongArray = np.flatnonzero(other)
    return rows
