"""The logit rules of each slot on the device, gathered for the rows that sample in a step.

What stays the same as long as the same sequences sample is gathered once; a step adds their positions and tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.logit_rules import NO_RULES, LogitRules
from shared.types import Admission
from worker_svc.layers.logit_rules import (
    BadWords,
    Context,
    Penalties,
    RuleTensors,
    TokenValues,
    apply_rules,
)
from worker_svc.layers.transfer import to_device
from worker_svc.runner.token_history import TokenHistory
from worker_svc.step_inputs import ROWS_AT_A_TIME, LongArray, SamplingInputs, StepRows


@dataclass(frozen=True, slots=True)
class Gathered:
    """The M ruled rows of a step, in row order, as far as they last."""

    rules: RuleTensors
    prompt_lengths: Tensor
    """[M]"""
    slots: Tensor
    """[M]"""
    looking_back: Tensor
    """[B]: which of the M look back."""


@dataclass(frozen=True, slots=True)
class RuledRows:
    """The M ruled rows among the N that sample in a step."""

    rows: Tensor
    """[M]"""
    context: Context
    gathered: Gathered
    start: int

    def apply(self, logits: Tensor) -> None:
        """Changes `logits` [N, tokens of this rank] in place."""
        own = logits[self.rows]
        apply_rules(own, self.start, self.gathered.rules, self.context)
        logits[self.rows] = own


class SlotRules:
    """Rules by slot. The rank's logits are those of `width` tokens from `start` on."""

    def __init__(self, num_slots: int, max_model_len: int, start: int, width: int, device: torch.device) -> None:
        self._start = start
        self._width = width
        self._device = device
        self._rules = [NO_RULES] * num_slots
        self._prompt_lengths = np.zeros(num_slots, dtype=np.int64)
        self._history = TokenHistory(num_slots, max_model_len, device)
        self._parts = -(-num_slots // ROWS_AT_A_TIME)
        self._gathered: dict[bytes, Gathered] = {}
        """By the rows' slots: as many as a step may have parts."""

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Sequences take their slots."""
        for admission in admissions:
            slot, rules = admission.slot, admission.sampling.rules
            self._rules[slot] = rules
            self._prompt_lengths[slot] = admission.prompt_length
            self._history.begin(slot, admission.cached_ids if rules.looks_back else None)
        if admissions:
            self._gathered.clear()

    def tell(self, rows: StepRows) -> None:
        """The rows of a step, before its sampling."""
        self._history.tell(rows)

    def rows(self, sampling: SamplingInputs) -> RuledRows | None:
        """Of rows that sample, a part of a step's; None where none has rules."""
        rows = np.flatnonzero(sampling.ruled)
        if not len(rows):
            return None
        slots, lengths = sampling.slots[rows], sampling.positions[rows]
        gathered = self._gathered_of(slots)
        tokens = self._history.read(gathered.slots, int(lengths.max()))
        context = Context(tokens, gathered.prompt_lengths, self._to_device(lengths))
        return RuledRows(self._to_device(rows), context, gathered, self._start)

    def sampled(self, ruled: RuledRows, token_ids: Tensor) -> None:
        """What those N rows sampled, [N]."""
        back = ruled.gathered.looking_back
        self._history.append(ruled.gathered.slots[back], ruled.context.lengths[back], token_ids[ruled.rows[back]])

    def _gathered_of(self, slots: LongArray) -> Gathered:
        key = slots.tobytes()
        if key not in self._gathered:
            if len(self._gathered) == self._parts:
                self._gathered.clear()
            self._gathered[key] = self._gather(slots)
        return self._gathered[key]

    def _gather(self, slots: LongArray) -> Gathered:
        rules = [self._rules[slot] for slot in slots]
        looking_back = [row for row, own in enumerate(rules) if own.looks_back]
        tensors = RuleTensors(self._allowed(rules), self._bad_words(rules), self._bias(rules), self._penalties(rules))
        return Gathered(
            tensors,
            self._to_device(self._prompt_lengths[slots]),
            self._to_device(slots),
            self._to_device(np.array(looking_back, dtype=np.int64)),
        )

    def _allowed(self, rules: Sequence[LogitRules]) -> tuple[Tensor, Tensor] | None:
        rows = [row for row, own in enumerate(rules) if own.allowed]
        if not rows:
            return None
        begin, size = self._start // 8, self._width // 8  # a rank's part of the vocabulary is whole bytes
        bits = np.zeros((len(rows), size), dtype=np.uint8)  # beyond the vocabulary none is allowed
        for own, row in zip(bits, rows, strict=True):
            known = np.frombuffer(rules[row].allowed, dtype=np.uint8)[begin : begin + size]
            own[: len(known)] = known
        return self._to_device(np.array(rows)), to_device(bits, self._device)

    def _bad_words(self, rules: Sequence[LogitRules]) -> BadWords | None:
        words = [(row, word) for row, own in enumerate(rules) for word in own.bad_words]
        if not words:
            return None
        width = max(len(word) for _, word in words) - 1
        prefixes = [[-1] * (width + 1 - len(word)) + list(word[:-1]) for _, word in words]
        return BadWords(
            rows=self._to_device(np.array([row for row, _ in words])),
            prefixes=self._to_device(np.array(prefixes, dtype=np.int64).reshape(len(words), width)),
            lengths=self._to_device(np.array([len(word) - 1 for _, word in words])),
            last_tokens=self._to_device(np.array([word[-1] for _, word in words])),
        )

    def _bias(self, rules: Sequence[LogitRules]) -> TokenValues | None:
        triples = [(row, token, value) for row, own in enumerate(rules) for token, value in own.bias]
        if not triples:
            return None
        rows, tokens, values = (np.array(column) for column in zip(*triples, strict=True))
        return TokenValues(self._to_device(rows), self._to_device(tokens), to_device(values, self._device))

    def _penalties(self, rules: Sequence[LogitRules]) -> Penalties | None:
        off = (NO_RULES.repetition_penalty, NO_RULES.frequency_penalty, NO_RULES.presence_penalty)
        values = [(own.repetition_penalty, own.frequency_penalty, own.presence_penalty) for own in rules]
        rows = [row for row, own in enumerate(values) if own != off]
        if not rows:
            return None
        columns = to_device(np.array([values[row] for row in rows]), self._device)
        repetition, frequency, presence = columns[:, :, None].unbind(1)
        return Penalties(self._to_device(np.array(rows)), repetition, frequency, presence)

    def _to_device(self, values: LongArray) -> Tensor:
        return to_device(values, self._device)
