"""Logprobs of prompts, row by row as they are computed, for the sequences that asked for them.

A token's logprob comes from the hidden state of the token before it, so the last one of each row is kept for the next.
Knows nothing of sampling. Logits are made for few tokens at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.types import Admission, IntArray
from worker_svc.layers.embedding import VocabParallelEmbedding
from worker_svc.layers.logprobs import token_logprobs
from worker_svc.layers.transfer import to_device
from worker_svc.step_inputs import ROWS_AT_A_TIME, StepRows


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Of one slot."""

    num_top: int
    begin: int
    """First position that is asked for,"""
    end: int
    """and the one after the last."""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """A row with tokens of such a prompt."""

    slot: int
    wanted: _Wanted
    start: int
    """Position of the row's first token."""
    first: int
    """Index of that token among the step's."""
    token_ids: IntArray
    """[count]: the row's."""


class PromptLogprobs:
    """By slot, for one rank."""

    def __init__(self, head: VocabParallelEmbedding) -> None:
        self._head = head
        self._wanted: dict[int, _Wanted] = {}
        self._before: dict[int, Tensor] = {}
        """[1, hidden]: of the last token of the slot's last row."""

    def reset(self) -> None:
        """A new epoch."""
        self._wanted.clear()
        self._before.clear()

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Sequences take their slots."""
        for admission in admissions:
            self._wanted.pop(admission.slot, None)
            self._before.pop(admission.slot, None)
            num_top, begin = admission.sampling.prompt_logprobs, admission.prompt_logprobs_from
            if num_top is not None and begin < admission.prompt_length:
                self._wanted[admission.slot] = _Wanted(num_top, begin, admission.prompt_length)

    def chunks(self, rows: StepRows) -> list[PromptChunk]:
        """The rows of a step that have tokens of such prompts."""
        if not self._wanted or rows.decodes:
            return []
        chunks = []
        firsts, told = rows.cu_seqlens.tolist(), 0
        for row, (slot, known, start) in enumerate(
            zip(rows.slots.tolist(), rows.known.tolist(), rows.starts.tolist(), strict=True)
        ):
            token_ids, told = rows.token_ids[told : told + known], told + known
            wanted = self._wanted.get(slot)
            if wanted is not None and start < wanted.end:
                chunks.append(PromptChunk(slot, wanted, start, firsts[row], token_ids))
        return chunks

    def compute(self, chunks: Sequence[PromptChunk], hidden: Tensor) -> tuple[Tensor, ...]:
        """Entries (shared.logprobs) of each chunk's tokens, as int32. `hidden` is [T, hidden], of the step's tokens."""
        return tuple(part for chunk in chunks for part in self._of_chunk(chunk, hidden))

    def _of_chunk(self, chunk: PromptChunk, hidden: Tensor) -> list[Tensor]:
        wanted, start = chunk.wanted, chunk.start
        states = hidden[chunk.first : chunk.first + len(chunk.token_ids)]
        before = self._before.pop(chunk.slot, states[:0])
        if start + len(states) < wanted.end:
            self._before[chunk.slot] = states[-1:].clone()
        begin, end = max(start, wanted.begin), min(start + len(states), wanted.end)
        if begin >= end:
            return []
        earlier = start - len(before)  # position of the first state that is there
        states = torch.cat((before, states))[begin - 1 - earlier : end - 1 - earlier]
        token_ids = to_device(chunk.token_ids[begin - start : end - start].astype("int64"), hidden.device)
        parts = zip(*(torch.split(values, ROWS_AT_A_TIME) for values in (states, token_ids)), strict=True)
        return [
            token_logprobs(self._head.group, self._head.logits(part), self._head.start, tokens, wanted.num_top)
            for part, tokens in parts
        ]
