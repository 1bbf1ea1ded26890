"""First part of a plan: blocks for the rows of running sequences, and who gives way where there are too few.

A sequence with a row in the plan being built never gives way: only less important ones do, and their turn comes
later. Nor does one whose last row is out: it ends soon by itself.
"""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.draft import PlanDraft, mask_bytes
from scheduler_svc.core.group import Group
from scheduler_svc.core.lifecycle import Lifecycle
from scheduler_svc.core.outputs import RequeueCause
from scheduler_svc.core.request import Sequence, State


class Want(NamedTuple):
    """What a running sequence needs for its next row."""

    sequence: Sequence
    blocks: int
    tokens: int
    """Known tokens of the row; 0 for a decode row."""


def reserve(group: Group, draft: PlanDraft, life: Lifecycle, config: CoreConfig) -> None:
    """Gives each running sequence the blocks of its next row, all or none."""
    wants = _wants(group, draft, config)
    if sum(want.blocks for want in wants) > group.pool.num_free:
        wants.sort(key=lambda want: want.sequence.rank)
    for want in wants:
        if want.sequence.state is not State.RUNNING:
            continue  # gave way to a more important one
        if draft.starved or not _has_room(want, group, draft, life):
            draft.starved.append(want.sequence)  # what little is free is not for the less important ones
        else:
            draft.grow(want.sequence, want.blocks)
            draft.granted[want.sequence] = want.tokens


def _wants(group: Group, draft: PlanDraft, config: CoreConfig) -> list[Want]:
    batch = group.batch
    wants = [Want(batch.at(slot), 1, 0) for slot in batch.lacking_block()]
    tokens_left = draft.tokens_left - len(batch.decode_rows().slots)
    for sequence in sorted(group.prefilling.values(), key=lambda sequence: sequence.rank):
        start, known = int(batch.computed[sequence.slot]), int(batch.known[sequence.slot])
        count = min(tokens_left, known - start)
        if not count or (start + count == known and not draft.claim(mask_bytes(sequence))):
            continue
        tokens_left -= count
        blocks = -(-(start + count) // config.block_size) - len(sequence.table)
        wants.append(Want(sequence, max(blocks, 0), count))
    return wants


def _has_room(want: Want, group: Group, draft: PlanDraft, life: Lifecycle) -> bool:
    short = want.blocks - group.pool.num_free
    if short <= 0:
        return True
    lesser = [other for other in group.batch.running() if other.rank > want.sequence.rank]
    victims = find_victims(group, lesser, short, kept=frozenset())
    for victim in victims:
        preempt(group, victim, draft, life)
    return bool(victims)


def find_victims(group: Group, lesser: Iterable[Sequence], short: int, kept: AbstractSet[int]) -> list[Sequence]:
    """The least important of `lesser` whose blocks, without `kept`, make up for `short` ones; none if all don't."""
    candidates = sorted(lesser, key=lambda sequence: sequence.rank)
    candidates = [sequence for sequence in candidates if not group.batch.is_drained(sequence.slot)]
    if not candidates or group.pool.num_freed_by([sequence.table for sequence in candidates], kept) < short:
        return []
    victims = [candidates.pop()]
    while group.pool.num_freed_by([sequence.table for sequence in victims], kept) < short:
        victims.append(candidates.pop())
    return victims


def preempt(group: Group, victim: Sequence, draft: PlanDraft, life: Lifecycle) -> None:
    """The victim goes back to the queue."""
    life.requeue(group, victim, RequeueCause.PREEMPTED)
    life.counters.preemptions += 1
    draft.preempted = True
