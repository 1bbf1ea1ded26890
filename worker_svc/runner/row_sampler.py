"""Samples rows in torch, with the rules of their slots, and tells logprobs: what both runners do alike on any device.

Owns what these need by slot. Knows nothing of how logits and hidden states came about.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shared.types import Admission
from worker_svc.layers.embedding import VocabParallelEmbedding
from worker_svc.layers.logprobs import token_logprobs
from worker_svc.layers.sampler import SampledTokens, Sampler
from worker_svc.runner.batch import Limits
from worker_svc.runner.outcome import NO_LOGPROBS, StepLogprobs
from worker_svc.runner.prompt_logprobs import PromptLogprobs
from worker_svc.runner.slot_rules import SlotRules
from worker_svc.step_inputs import LongArray, SamplingInputs, StepRows


class RowSampler:
    """Of one rank, which has `head`'s part of the vocabulary."""

    def __init__(self, head: VocabParallelEmbedding, limits: Limits, device: torch.device) -> None:
        self.prompts = PromptLogprobs(head)
        self._head = head
        self._sampler = Sampler(head.group, head.start, limits.vocabulary_size)
        self._rules = SlotRules(limits.max_num_seqs, limits.max_model_len, head.start, len(head.weight), device)

    def begin(self, admissions: Sequence[Admission], rows: StepRows) -> None:
        """Takes over what a plan brings. Before anything else of its step."""
        self._rules.admit(admissions)
        self.prompts.admit(admissions)
        self._rules.tell(rows)

    def sample(self, logits: Tensor, sampling: SamplingInputs) -> SampledTokens:
        """One token per row. `logits` [N, tokens of this rank] are changed in place."""
        ruled = self._rules.rows(sampling)
        if ruled is None:
            return self._sampler(logits, sampling)
        sampled = self._sampler(logits, sampling, ruled.apply)
        self._rules.sampled(ruled, sampled.token_ids)
        return sampled

    def logprobs(self, logits: Tensor, token_ids: Tensor, num_top: LongArray) -> StepLogprobs:
        """Of n sampled tokens, whose logits [n, tokens of this rank] nothing has changed; `num_top` is [n]."""
        if not len(num_top):
            return NO_LOGPROBS
        entries = token_logprobs(self._head.group, logits, self._head.start, token_ids, int(num_top.max()))
        return StepLogprobs(entries, num_top)


def logged_rows(sampling: SamplingInputs) -> LongArray:
    """Which of the sampling rows asked for logprobs."""
    rows: LongArray = np.flatnonzero(sampling.logprobs >= 0)
    return rows
