"""Runs plans on one GPU: folds them on the host, sends what changed, launches, and does not wait.

The host's batch state checks plans and knows what the device holds; steps follow each other on the device without it.
Where the same rows decode again, the device knows all of the next step: it is one launch.
"""

from dataclasses import dataclass

import numpy as np
import torch

from shared.types import NO_INTS, IntArray, StepPlan
from worker_svc.kernels.candidates import MAX_TOP_K
from worker_svc.layers.attention import TorchAttention
from worker_svc.layers.kv_cache import KVCache
from worker_svc.layers.sampler import Sampler
from worker_svc.runner.batch import BatchState
from worker_svc.runner.device_state import MAX_SUPPRESSED, DeviceState
from worker_svc.runner.lanes import Lane, Lanes, LaneTokens
from worker_svc.runner.programs import Programs
from worker_svc.runner.runner import PendingTokens
from worker_svc.runner.step_kernels import GpuAttention, StepKernels
from worker_svc.step_inputs import LongArray, SamplingInputs, StepRows


@dataclass(frozen=True, slots=True)
class NoTokens:
    """Of a plan without rows. See runner.PendingTokens."""

    def to_host(self) -> tuple[IntArray, IntArray]:
        """Nothing."""
        return NO_INTS, NO_INTS


@dataclass(frozen=True, slots=True)
class _Others:
    """Rows that sample in a way that the kernels don't know."""

    rows: LongArray
    """Which of the step's rows."""
    sampling: SamplingInputs


@dataclass(frozen=True, slots=True)
class _Launch:
    """What runs for the rows of a step."""

    bucket: tuple[int, int]
    """Tokens and rows."""
    narrow: bool
    """Whether some rows sample from their top 64 tokens or fewer."""
    others: _Others | None
    padding: int
    """Tokens of the bucket that are no row's."""


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
        self.padding = 0
        """See Runner."""
        self._state = state
        self._kernels = kernels
        self._programs = programs
        self._sampler = sampler
        self._lanes = lanes
        self._device = state.values.device
        self._torch_attention = TorchAttention(self._device)
        self._flash = attention.flash is not None
        self._last: _Launch | None = None

    @property
    def num_graphs(self) -> int:
        """See Runner."""
        return self._programs.captured

    @property
    def graph_launches(self) -> int:
        """See Runner."""
        return self._programs.launches

    def open_epoch(self) -> None:
        """See Runner."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.batch.reset()
        self._state.drop_changes()

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> PendingTokens:
        """See Runner. It has begun when this returns."""
        rows = self.batch.fold(plan)
        self.cache.zero(rows.zeroed)
        self._state.admit(plan.admitted)
        self._state.grow(*rows.grown.T)
        if not len(rows.slots):
            self._update_alone()
            return NoTokens()
        launch = self._launch_of(rows)
        self.padding += launch.padding
        lane = self._lanes.take()
        try:
            self._update(lane)
            self._run(rows, launch)
            self._lanes.delivered()
            if launch.others is not None:
                self._sample_others(launch.others)
                lane.sampled.copy_(self._kernels.sampled, non_blocking=True)
            lane.done.record()
        except BaseException:
            self._lanes.give_back()
            raise
        return LaneTokens(lane, self._lanes, rows.samples)

    def _update(self, lane: Lane) -> None:
        changes = self._state.take_changes()
        if changes is not None:
            self._kernels.update(lane.stage(changes))

    def _update_alone(self) -> None:
        """The changes of a plan without rows: the next step gets the same lane, so they must have been read."""
        lane = self._lanes.take()
        try:
            self._update(lane)
            lane.done.record()
            lane.done.synchronize()
        finally:
            self._lanes.give_back()

    def _launch_of(self, rows: StepRows) -> _Launch:
        """As for the step before, where nothing that matters has changed."""
        last = self._last
        if last is None or not rows.repeated or rows.masks or last.others is not None:
            last = self._last = self._prepare(rows)
        return last

    def _prepare(self, rows: StepRows) -> _Launch:
        """Sees to it that the device gets to know the rows."""
        self._state.set_rows(rows.slots)
        bucket = self._decode_bucket(rows) if rows.decodes else self._mixed_bucket(rows)
        sampling = self.batch.sampling(rows)
        narrow = bool((sampling.filtered & (sampling.top_k <= MAX_TOP_K)).any())
        padding = bucket[0] - int(rows.counts.sum())
        others = _others(sampling)
        if not len(others):
            return _Launch(bucket, narrow, None, padding)
        index = np.flatnonzero(rows.samples)[others]
        return _Launch(bucket, narrow, _Others(index, sampling.select(others)), padding)

    def _decode_bucket(self, rows: StepRows) -> tuple[int, int]:
        size = self._programs.decode_size(len(rows.slots))
        return size, size

    def _mixed_bucket(self, rows: StepRows) -> tuple[int, int]:
        token_ids = rows.all_token_ids
        bucket = self._programs.mixed_size(len(token_ids), len(rows.slots))
        self._state.set_tokens(rows.starts, rows.cu_seqlens, token_ids, bucket[1])
        return bucket

    def _run(self, rows: StepRows, launch: _Launch) -> None:
        if rows.decodes:
            self._programs.decode(launch.bucket[1], narrow=launch.narrow)
            return
        if self._flash:
            self._programs.mixed(launch.bucket)
        else:
            self._kernels.mixed(*launch.bucket, self._torch_attention.prepare(self.batch.inputs(rows)))
        self._programs.sample(launch.bucket[1], narrow=launch.narrow)

    def _sample_others(self, others: _Others) -> None:
        """They take their tokens from torch instead."""
        rows, slots = (torch.from_numpy(index).to(self._device) for index in (others.rows, others.sampling.slots))
        sampled = self._sampler(self._kernels.logits[rows], others.sampling)
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
