"""Last part of a plan: sequences that leave the queue and take a slot, most important first."""

from collections import Counter
from collections.abc import Mapping

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.draft import PlanDraft, admission_bytes, mask_bytes
from scheduler_svc.core.group import Group
from scheduler_svc.core.lifecycle import Lifecycle
from scheduler_svc.core.placement import Fit, Placement
from scheduler_svc.core.quarantine import is_suspect
from scheduler_svc.core.request import Sequence
from scheduler_svc.core.reservation import find_victims, preempt
from shared.types import IntArray

MOST_LOOKED_AT = 32
"""Sequences that one plan looks at in vain: the bound on what a long queue costs a step."""


class Admitter:
    """Admits to one group at a time."""

    def __init__(self, config: CoreConfig, life: Lifecycle, placement: Placement) -> None:
        self._config = config
        self._life = life
        self._placement = placement

    def make_way(self, group: Group, draft: PlanDraft) -> None:
        """Preempts for the first of the queue, if it fits nowhere and is strictly more important than who runs here.

        The plan admits nobody then: the next one does.
        """
        if not group.priorities:
            return
        for sequence in self._life.queue.more_important_than(max(group.priorities)):
            tokens = sequence.waiting_tokens()
            if self._placement.allowed(group, sequence, len(tokens)):
                self._make_way_for(sequence, tokens, group, draft)
                return

    def _make_way_for(self, sequence: Sequence, tokens: IntArray, group: Group, draft: PlanDraft) -> None:
        taken = len(group.batch.decode_rows().slots) + sum(draft.granted.values())
        fit = self._placement.fit(group, sequence, tokens, max(1, draft.tokens_left - taken))
        if self._placement.has_room(group, fit) or self._placement.other_takers(group, sequence, tokens):
            return
        lesser = [
            other
            for other in group.batch.running()
            if other.request.priority > sequence.request.priority and other not in draft.granted
        ]
        short = fit.blocks - group.pool.num_free_beside(fit.cached.blocks)
        for victim in find_victims(group, lesser, max(short, 0), frozenset(fit.cached.blocks)):
            preempt(group, victim, draft, self._life)

    def admit(self, group: Group, draft: PlanDraft) -> None:
        """Admits what fits. Who doesn't is passed by smaller ones during at most `look_past_steps` steps."""
        batch = group.batch
        if not batch.free_slots:
            return
        planned: Counter[int] = Counter()
        misfits: list[Sequence] = []
        passed: list[Sequence] = []
        for sequence in self._life.queue:
            if not batch.free_slots or not draft.tokens_left or len(misfits) + planned.total() == MOST_LOOKED_AT:
                break
            if not self._placement.allowed(group, sequence, sequence.waiting_length):
                continue
            tokens = sequence.waiting_tokens()
            fit = self._placement.fit(group, sequence, tokens, draft.tokens_left)
            chosen = self._choose(group, sequence, tokens, fit, planned)
            if chosen is None:
                misfits.append(sequence)
                if sequence.passed >= self._config.look_past_steps:
                    break
            elif chosen != group.number:
                planned[chosen] += 1
            elif draft.claim(admission_bytes(sequence, fit.cached) + mask_bytes(sequence)):
                self._admit(group, draft, sequence, tokens, fit)
                passed = list(misfits)
            else:
                break
        for sequence in passed:
            sequence.passed += 1

    def _choose(
        self, group: Group, sequence: Sequence, tokens: IntArray, fit: Fit, planned: Mapping[int, int]
    ) -> int | None:
        """The number of the group that the sequence goes to, None if there is room nowhere."""
        takers = self._placement.other_takers(group, sequence, tokens)
        if self._placement.has_room(group, fit):
            takers[group.number] = fit
        return self._placement.choose(takers, planned) if takers else None

    def _admit(self, group: Group, draft: PlanDraft, sequence: Sequence, tokens: IntArray, fit: Fit) -> None:
        if is_suspect(sequence, len(tokens)):
            group.suspects.add(sequence)
        self._life.start(sequence, fit.cached.length)
        draft.admit(sequence, tokens, fit.cached)
        draft.grow(sequence, fit.blocks)
        draft.compute(sequence, fit.count)
