"""What runs for the rows of a step on a GPU: the bucket, and the rows that kernels don't serve whole."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker_svc.kernels.candidates import MAX_TOP_K
from worker_svc.layers.transfer import to_device
from worker_svc.runner.device_state import MAX_SUPPRESSED
from worker_svc.runner.row_sampler import logged_rows
from worker_svc.step_inputs import LongArray, SamplingInputs, StepRows


@dataclass(frozen=True, slots=True)
class Others:
    """Rows that sample in a way that the kernels don't know."""

    rows: LongArray
    """Which of the step's rows."""
    sampling: SamplingInputs


@dataclass(frozen=True, slots=True)
class Logged:
    """Rows that asked for logprobs."""

    rows: Tensor
    """[n]: which of the step's rows, on the device."""
    num_top: LongArray
    """[n]: for how many most likely tokens each asked."""


@dataclass(frozen=True, slots=True)
class Launch:
    """For any step of the same rows with the same parameters."""

    bucket: tuple[int, int]
    """Tokens and rows."""
    narrow: bool
    """Whether some rows sample from their top 64 tokens or fewer."""
    others: Others | None
    logged: Logged | None
    padding: int
    """Tokens of the bucket that are no row's."""


def launch_of(rows: StepRows, sampling: SamplingInputs, bucket: tuple[int, int], device: torch.device) -> Launch:
    """Of rows that fit in the bucket."""
    narrow = bool((sampling.filtered & (sampling.top_k <= MAX_TOP_K)).any())
    numbers, others, logged = np.flatnonzero(rows.samples), _others(sampling), logged_rows(sampling)
    return Launch(
        bucket,
        narrow,
        Others(numbers[others], sampling.select(others)) if len(others) else None,
        Logged(to_device(numbers[logged], device), sampling.logprobs[logged]) if len(logged) else None,
        padding=bucket[0] - int(rows.counts.sum()),
    )


def _others(sampling: SamplingInputs) -> LongArray:
    """The sampling rows that need a whole distribution, a mask, logit rules, or more suppressed tokens than the
    kernels know."""
    other = sampling.filtered & ~((sampling.top_k > 0) & (sampling.top_k <= MAX_TOP_K)) | sampling.ruled
    other[[row for row, _ in sampling.masks]] = True
    if len(sampling.suppressed):
        other |= np.bincount(sampling.suppressed[:, 0], minlength=len(other)) > MAX_SUPPRESSED
    rows: LongArray = np.flatnonzero(other)
    return rows
