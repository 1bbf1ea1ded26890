"""Runs plans on one GPU: folds them on the host, sends what changed, launches, and does not wait.

The host's batch state checks plans and knows what the device holds; steps follow each other on the device without it.
Where the same rows decode again, the device knows all of the next step: it is one launch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.types import StepPlan
from worker_svc.layers.attention import TorchAttention
from worker_svc.layers.kv_cache import KVCache
from worker_svc.layers.transfer import to_device
from worker_svc.runner.batch import BatchState
from worker_svc.runner.device_state import DeviceState
from worker_svc.runner.lanes import Lane, Lanes, LaneTokens
from worker_svc.runner.launch import Launch, Logged, Others, launch_of
from worker_svc.runner.outcome import NO_LOGPROBS, StepLogprobs, StepTokens
from worker_svc.runner.programs import Programs
from worker_svc.runner.prompt_logprobs import PromptChunk
from worker_svc.runner.row_sampler import RowSampler
from worker_svc.runner.runner import PendingTokens
from worker_svc.runner.step_kernels import GpuAttention, StepKernels
from worker_svc.step_inputs import LongArray, StepRows


@dataclass(frozen=True, slots=True)
class NoTokens:
    """Of a plan without rows. See runner.PendingTokens."""

    def to_host(self) -> StepTokens:
        """Nothing."""
        return StepTokens()


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
        sampler: RowSampler,
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
        self._last: Launch | None = None

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
        self._sampler.prompts.reset()

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> PendingTokens:
        """See Runner. It has begun when this returns."""
        rows = self.batch.fold(plan)
        self.cache.zero(rows.zeroed)
        self._state.admit(plan.admitted)
        self._state.grow(*rows.grown.T)
        self._sampler.begin(plan.admitted, rows)
        if not len(rows.slots):
            self._update_alone()
            return NoTokens()
        launch = self._launch_of(rows)
        self.padding += launch.padding
        lane = self._lanes.take()
        try:
            self._update(lane)
            prompt = self._run(rows, launch)
            self._lanes.delivered()
            if launch.others is not None:
                self._sample_others(launch.others)
                lane.sampled.copy_(self._kernels.sampled, non_blocking=True)
            logprobs = self._logprobs(launch.logged, prompt)
            lane.done.record()
        except BaseException:
            self._lanes.give_back()
            raise
        return LaneTokens(lane, self._lanes, rows.samples, logprobs)

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

    def _launch_of(self, rows: StepRows) -> Launch:
        """As for the step before, where nothing that matters has changed."""
        last = self._last
        if last is None or not rows.repeated or rows.masks or last.others is not None:
            last = self._last = self._prepare(rows)
        return last

    def _prepare(self, rows: StepRows) -> Launch:
        """Sees to it that the device gets to know the rows."""
        self._state.set_rows(rows.slots)
        bucket = self._decode_bucket(rows) if rows.decodes else self._mixed_bucket(rows)
        return launch_of(rows, self.batch.sampling(rows), bucket, self._device)

    def _decode_bucket(self, rows: StepRows) -> tuple[int, int]:
        size = self._programs.decode_size(len(rows.slots))
        return size, size

    def _mixed_bucket(self, rows: StepRows) -> tuple[int, int]:
        token_ids = rows.all_token_ids
        bucket = self._programs.mixed_size(len(token_ids), len(rows.slots))
        self._state.set_tokens(rows.starts, rows.cu_seqlens, token_ids, bucket[1])
        return bucket

    def _run(self, rows: StepRows, launch: Launch) -> tuple[Tensor, ...]:
        """To the tokens of the rows that the kernels can sample; logprobs of prompts."""
        if rows.decodes:
            self._programs.decode(launch.bucket[1], narrow=launch.narrow)
            return ()
        prompt = self._mixed(rows, launch.bucket, self._sampler.prompts.chunks(rows))
        self._programs.sample(launch.bucket[1], narrow=launch.narrow)
        return prompt

    def _mixed(self, rows: StepRows, bucket: tuple[int, int], prompts: Sequence[PromptChunk]) -> tuple[Tensor, ...]:
        """A graph's hidden states are overwritten by the next one, so steps that need them are launched without."""
        if self._flash and not prompts:
            self._programs.mixed(bucket)
            return ()
        attention = None if self._flash else self._torch_attention.prepare(self.batch.inputs(rows))
        return self._sampler.prompts.compute(prompts, self._kernels.mixed(*bucket, attention))

    def _logprobs(self, logged: Logged | None, prompt: tuple[Tensor, ...]) -> StepLogprobs:
        if logged is None:
            return StepLogprobs(prompt=prompt).sent() if prompt else NO_LOGPROBS
        tokens = self._kernels.sampled[0, logged.rows].long()
        logprobs = self._sampler.logprobs(self._kernels.logits, logged.rows, tokens, logged.num_top)
        return replace(logprobs, prompt=prompt).sent()

    def _sample_others(self, others: Others) -> None:
        """They take their tokens from torch instead."""
        rows, slots = self._to_device(others.rows), self._to_device(others.sampling.slots)
        sampled = self._sampler.sample(self._kernels.logits, rows, others.sampling)
        tokens = sampled.token_ids.int()
        self._kernels.sampled[:, rows] = torch.stack((tokens, sampled.failed.int()))
        self._state.slots.last_tokens[slots] = tokens

    def _to_device(self, values: LongArray) -> Tensor:
        return to_device(values, self._device)
