"""Moves sequences away from a group that is about to leave, as far as others have room. Chooses nobody's new place:
they go back to the queue, and admission does.
"""

from collections.abc import Mapping

from scheduler_svc.core.group import Group
from scheduler_svc.core.lifecycle import Lifecycle
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.outputs import RequeueCause
from scheduler_svc.core.placement import Placement
from scheduler_svc.core.request import Sequence


def hand_over(
    leaving: Group, groups: Mapping[int, Group], life: Lifecycle, placement: Placement, limits: Limits
) -> None:
    """The most important first. Who finds no room goes on where it is; nobody is moved while others wait for room."""
    if len(life.queue):
        return
    others = [group for group in groups.values() if group is not leaving and group.has_joined]
    slots = {group.number: len(group.batch.free_slots) for group in others}
    blocks = {group.number: group.pool.num_free for group in others}
    for sequence in sorted(leaving.batch.running(), key=lambda sequence: sequence.rank):
        known = int(leaving.batch.known[sequence.slot])
        needed = limits.blocks_needed(known + 1)
        for group in others:
            if slots[group.number] and needed <= blocks[group.number] and placement.takes(group, sequence, known):
                slots[group.number] -= 1
                blocks[group.number] -= needed
                _move(leaving, sequence, life)
                break


def _move(leaving: Group, sequence: Sequence, life: Lifecycle) -> None:
    life.requeue(leaving, sequence, RequeueCause.DRAINED)
    life.counters.requeued += 1
