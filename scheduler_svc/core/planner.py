"""Builds the plans, each in one order: who gives way, decode rows, rows of known tokens, admissions."""

from scheduler_svc.core.admission import Admitter
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.draft import PlanDraft, mask_bytes
from scheduler_svc.core.group import Group
from scheduler_svc.core.lifecycle import Lifecycle
from scheduler_svc.core.placement import Placement
from scheduler_svc.core.request import State
from scheduler_svc.core.reservation import reserve
from shared.types import StepPlan


class Planner:
    """Plans one step of one group at a time."""

    def __init__(self, config: CoreConfig, life: Lifecycle, placement: Placement) -> None:
        self._config = config
        self._life = life
        self._admitter = Admitter(config, life, placement)

    def plan(self, group: Group, patient: bool) -> StepPlan | None:
        """The group's next plan; None where there is nothing to compute. `patient`: see Scheduler.schedule."""
        draft = PlanDraft(group, self._config)
        waits = patient and group.is_gathering and not group.prefilling
        for slot, sequence in () if waits else group.masked.items():
            group.batch.set_decoding(slot, draft.claim(mask_bytes(sequence)))
        reserve(group, draft, self._life, self._config)
        self._admitter.make_way(group, draft)
        _decode(group, draft)
        for sequence, count in draft.granted.items():
            if count:
                draft.compute(sequence, count)
        if not draft.preempted and not draft.starved:
            self._admitter.admit(group, draft)
        self._life.counters.scheduled_tokens += self._config.max_plan_tokens - draft.tokens_left
        return draft.finish()


def _decode(group: Group, draft: PlanDraft) -> None:
    """Rows for the decoding slots that have their blocks."""
    starved = [
        sequence.slot
        for sequence in draft.starved
        if sequence.state is State.RUNNING and group.batch.decoding[sequence.slot]
    ]
    for slot in starved:
        group.batch.set_decoding(slot, False)
    draft.decode()
    for slot in starved:
        group.batch.set_decoding(slot, True)
