"""Turns logits that are split over the ranks by vocabulary into one token per row, the same on every rank.

A token is argmax(logits / temperature - log E) with E ~ Exp(1): a sample of softmax(logits / temperature), the Gumbel
maximum trick (Maddison et al. 2014). Common rows exchange one (value, token) per rank; for filtered rows rank 0 gets
all logits and decides.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker_svc.layers.filters import filter_logits
from worker_svc.layers.noise import exponential, row_keys, torch_noise_bits
from worker_svc.layers.norm import wide
from worker_svc.layers.transfer import to_device
from worker_svc.parallel import TensorParallel
from worker_svc.step_inputs import LongArray, SamplingInputs


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token per sampling row."""

    token_ids: Tensor
    """[N] int64; 0 where the row failed."""
    failed: Tensor
    """[N] bool: the row's logits had no finite maximum."""


class Sampler:
    """Samples on one rank, which has the logits of the tokens from `start` on."""

    def __init__(self, group: TensorParallel, start: int, vocabulary_size: int) -> None:
        self._group = group
        self._start = start
        self._vocabulary_size = vocabulary_size

    def __call__(
        self, logits: Tensor, inputs: SamplingInputs, rules: Callable[[Tensor], None] | None = None
    ) -> SampledTokens:
        """`logits` [N, tokens of this rank], changed in place; `rules` changes them too, before temperature and
        filters. Every rank calls it with the same inputs."""
        logits = logits.to(wide(logits.dtype))
        self._restrict(logits, inputs)
        if rules is not None:
            rules(logits)
        temperature = to_device(np.where(inputs.greedy, 1, inputs.temperature), logits.device)
        logits /= temperature.to(logits.dtype)[:, None]
        token_ids = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        best = torch.zeros_like(logits[:, 0])
        for chosen_rows, choose in ((~inputs.filtered, self._choose_common), (inputs.filtered, self._choose_filtered)):
            rows = np.flatnonzero(chosen_rows)
            if len(rows):
                index = to_device(rows, logits.device)
                best[index], token_ids[index] = choose(logits[index], inputs, rows)
        failed = ~best.isfinite()
        return SampledTokens(token_ids.masked_fill(failed, 0), failed)

    def _restrict(self, logits: Tensor, inputs: SamplingInputs) -> None:
        """Takes out suppressed tokens and those outside a mask."""
        end = self._start + logits.shape[1]
        rows, tokens = inputs.suppressed.T.astype(np.int64)
        here = (tokens >= self._start) & (tokens < end)
        rows, tokens = to_device(np.stack((rows[here], tokens[here] - self._start)), logits.device)
        logits[rows, tokens] = -torch.inf
        for row, allowed in inputs.masks:
            local = to_device(~allowed[self._start : end], logits.device)
            logits[row, : len(local)].masked_fill_(local, -torch.inf)

    def _choose_common(self, logits: Tensor, inputs: SamplingInputs, rows: LongArray) -> tuple[Tensor, Tensor]:
        """Each rank's best, then the best of all; the lowest token of equal ones."""
        values, indices = _add_noise(logits, inputs, rows, self._start).max(-1)
        pairs = torch.stack((values.double(), (indices + self._start).double()), dim=-1)
        values, tokens = self._group.all_gather(pairs).unbind(-1)  # [ranks, n]
        best, rank = values.max(0)
        return best.to(logits.dtype), tokens.gather(0, rank[None])[0].long()

    def _choose_filtered(self, logits: Tensor, inputs: SamplingInputs, rows: LongArray) -> tuple[Tensor, Tensor]:
        """Rank 0 decides on the whole distribution and tells the others."""
        parts = self._group.gather_to_first(logits)
        chosen = torch.empty(len(logits), 2, dtype=torch.float64, device=logits.device)
        if parts:
            whole = torch.cat(parts, dim=-1)[:, : self._vocabulary_size]
            limits = (inputs.top_k, inputs.top_p, inputs.min_p)
            top_k, top_p, min_p = (to_device(x[rows], whole.device) for x in limits)
            most = int(np.where(inputs.top_k[rows] == 0, self._vocabulary_size, inputs.top_k[rows]).max())
            kept = filter_logits(whole, top_k, top_p, min_p, most)
            values, indices = _add_noise(kept, inputs, rows, 0).max(-1)
            chosen = torch.stack((values.double(), indices.double()), dim=-1)
        best, tokens = self._group.broadcast(chosen).unbind(-1)
        return best.to(logits.dtype), tokens.long()


def _add_noise(logits: Tensor, inputs: SamplingInputs, rows: LongArray, start: int) -> Tensor:
    """In place: logits - log E, except in greedy rows. `logits` are those of `rows` and the tokens from `start` on."""
    noisy = np.flatnonzero(~inputs.greedy[rows])
    if len(noisy):
        keys = row_keys(inputs.seeds[rows[noisy]], inputs.positions[rows[noisy]])
        bits = torch_noise_bits(keys, start, logits.shape[1], logits.device)
        logits[to_device(noisy, logits.device)] -= exponential(bits, logits.dtype).log_()
    return logits
