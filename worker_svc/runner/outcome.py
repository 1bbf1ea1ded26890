"""What a step gives besides K/V: tokens, which rows failed, and logprobs as the bytes that travel."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shared.types import NO_INTS, IntArray
from shared.wire import LITTLE_INT32
from worker_svc.layers.sampler import SampledTokens
from worker_svc.step_inputs import LongArray


class StepTokens(NamedTuple):
    """On the host."""

    token_ids: IntArray = NO_INTS
    """[N]: of the sampling rows, in row order."""
    failed_rows: IntArray = NO_INTS
    """Indices into `token_ids`."""
    logprobs: bytes = b""
    """As in StepResult."""
    prompt_logprobs: bytes = b""
    """As in StepResult."""


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """What token_logprobs gave, perhaps still on its way to the host."""

    entries: Tensor | None = None
    """[n, 2 + 2 * most] int32: of those of the sampling rows that asked for logprobs."""
    num_top: LongArray | None = None
    """[n]: for how many most likely tokens each of them asked."""
    prompt: tuple[Tensor, ...] = ()
    """[m, 2 + 2 * its own number]: of tokens of prompts."""

    def sent(self) -> "StepLogprobs":
        """Its tensors in host memory, there once the device has done what was launched so far."""
        entries = None if self.entries is None else _sent(self.entries)
        return StepLogprobs(entries, self.num_top, tuple(map(_sent, self.prompt)))

    def pack(self) -> tuple[bytes, bytes]:
        """StepTokens.logprobs and prompt_logprobs. Its tensors must be there."""
        return self._pack_rows(), b"".join(_little(part) for part in self.prompt)

    def _pack_rows(self) -> bytes:
        if self.entries is None or self.num_top is None:
            return b""
        asked = np.arange(self.entries.shape[1]) < 2 + 2 * self.num_top[:, None]
        return self.entries.cpu().numpy()[asked].astype(LITTLE_INT32, copy=False).tobytes()


NO_LOGPROBS = StepLogprobs()


@dataclass(frozen=True, slots=True)
class Outcome:
    """See runner.PendingTokens."""

    sampled: SampledTokens
    logprobs: StepLogprobs

    def to_host(self) -> StepTokens:
        """See PendingTokens."""
        token_ids, failed = self.sampled.token_ids, self.sampled.failed
        failed_rows = failed.nonzero()[:, 0].int().cpu().numpy()
        return StepTokens(token_ids.int().cpu().numpy(), failed_rows, *self.logprobs.pack())


def _sent(values: Tensor) -> Tensor:
    if not values.is_cuda:
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def _little(values: Tensor) -> bytes:
    return values.cpu().numpy().astype(LITTLE_INT32, copy=False).tobytes()
