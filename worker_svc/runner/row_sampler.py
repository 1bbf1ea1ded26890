"""Samples rows in torch, with the rules of their slots, and tells logprobs: what both runners do alike on any device.

Owns what these need by slot, and works on few rows at a time. Knows nothing of how logits and hidden states came about.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shared.logit_rules import LogitRules
from shared.logprobs import MOST_LOGPROBS
from shared.types import NO_INTS, Admission, RowSampling
from worker_svc.layers.embedding import VocabParallelEmbedding
from worker_svc.layers.logprobs import token_logprobs
from worker_svc.layers.sampler import SampledTokens, Sampler
from worker_svc.runner.batch import Limits
from worker_svc.runner.outcome import NO_LOGPROBS, StepLogprobs
from worker_svc.runner.prompt_logprobs import PromptLogprobs
from worker_svc.runner.sampling_state import SamplingState
from worker_svc.runner.slot_rules import SlotRules
from worker_svc.step_inputs import ROWS_AT_A_TIME, LongArray, SamplingInputs, StepRows


class RowSampler:
    """Of one rank, which has `head`'s part of the vocabulary."""

    def __init__(self, head: VocabParallelEmbedding, limits: Limits, device: torch.device) -> None:
        self.prompts = PromptLogprobs(head)
        self._head = head
        self._limits = limits
        self._sampler = Sampler(head.group, head.start, limits.vocabulary_size)
        self._rules = SlotRules(limits.max_num_seqs, limits.max_model_len, head.start, len(head.weight), device)

    def begin(self, admissions: Sequence[Admission], rows: StepRows) -> None:
        """Takes over what a plan brings. Before anything else of its step."""
        self._rules.admit(admissions)
        self.prompts.admit(admissions)
        self._rules.tell(rows)

    def sample(self, logits: Tensor, rows: Tensor, sampling: SamplingInputs) -> SampledTokens:
        """One token for each of `rows` [N] of `logits` [*, tokens of this rank], which stay what they are."""
        parts = torch.split(rows, ROWS_AT_A_TIME)
        if len(parts) == 1:
            return self._sample(logits[rows], sampling)
        numbers = np.split(np.arange(len(rows)), range(ROWS_AT_A_TIME, len(rows), ROWS_AT_A_TIME))
        sampled = [self._sample(logits[part], sampling.select(own)) for part, own in zip(parts, numbers, strict=True)]
        return SampledTokens(
            torch.cat([part.token_ids for part in sampled]), torch.cat([part.failed for part in sampled])
        )

    def _sample(self, logits: Tensor, sampling: SamplingInputs) -> SampledTokens:
        """Changes the logits."""
        ruled = self._rules.rows(sampling)
        if ruled is None:
            return self._sampler(logits, sampling)
        sampled = self._sampler(logits, sampling, ruled.apply)
        self._rules.sampled(ruled, sampled.token_ids)
        return sampled

    def logprobs(self, logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: LongArray) -> StepLogprobs:
        """Of n tokens, sampled in `rows` [n] of `logits` [*, tokens of this rank]; `num_top` is [n]."""
        if not len(num_top):
            return NO_LOGPROBS
        head, most = self._head, int(num_top.max())
        entries = [
            token_logprobs(head.group, logits[part], head.start, tokens, most)
            for part, tokens in zip(*(torch.split(values, ROWS_AT_A_TIME) for values in (rows, token_ids)), strict=True)
        ]
        return StepLogprobs(torch.cat(entries), num_top)

    def warm_up(self, logits: Tensor) -> None:
        """Takes the memory that a part of a step takes at most, and lets go of it: for whoever measures what is left.

        `logits` [*, tokens of this rank] are any. What the slots held is gone.
        """
        rows, length = min(ROWS_AT_A_TIME, len(logits)), self._limits.max_model_len
        vocabulary_size = self._limits.vocabulary_size
        rules = LogitRules(allowed=b"\xff" * -(-vocabulary_size // 8), frequency_penalty=1.0)
        sampling = RowSampling(top_p=0.5, rules=rules)
        state = SamplingState(rows, vocabulary_size)
        for slot in range(rows):
            admission = Admission(slot, length, 0, length, NO_INTS, sampling)
            state.admit("", admission)
            self._rules.admit([admission])
        slots = np.arange(rows)
        index = torch.arange(rows, device=logits.device)
        sampled = self.sample(logits, index, state.inputs(slots, slots, np.full(rows, length), ()))
        self.logprobs(logits, index, sampled.token_ids, np.full(rows, min(MOST_LOGPROBS, vocabulary_size)))


def logged_rows(sampling: SamplingInputs) -> LongArray:
    """Which of the sampling rows asked for logprobs."""
    rows: LongArray = np.flatnonzero(sampling.logprobs >= 0)
    return rows
