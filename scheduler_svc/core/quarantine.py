"""Keeps a request that makes workers die from taking others with it.

A sequence counts the losses that hit it in flight since its last token. After two it is a suspect: it is replayed
with no other suspect beside it, so that the next loss tells which one it was. After two more it ends.
"""

from scheduler_svc.core.group import Group
from scheduler_svc.core.request import Sequence

SUSPECT_LOSSES = 2
MOST_LOSSES = 4


def count_loss(sequence: Sequence, known: int) -> bool:
    """A loss hit the sequence in flight, with `known` tokens; whether that was the last one it may cause."""
    progressed = known > sequence.known_at_loss
    sequence.losses = 1 if progressed else sequence.losses + 1
    sequence.known_at_loss = known
    return sequence.losses >= MOST_LOSSES


def is_suspect(sequence: Sequence, known: int) -> bool:
    """Whether it must have no other suspect beside it."""
    return sequence.losses >= SUSPECT_LOSSES and known <= sequence.known_at_loss


def may_join(group: Group, sequence: Sequence, known: int) -> bool:
    """Whether a waiting sequence may run beside those that run in the group."""
    if not is_suspect(sequence, known):
        return True
    return not any(is_suspect(other, int(group.batch.known[other.slot])) for other in group.suspects)
