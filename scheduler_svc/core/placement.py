"""Which group a waiting sequence goes to, among those that can take it now. Changes nothing."""

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.group import CachedPrefix, Group
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.quarantine import may_join
from scheduler_svc.core.request import Sequence
from shared.types import IntArray


@dataclass(frozen=True, slots=True)
class Fit:
    """How a group can take a sequence."""

    cached: CachedPrefix
    count: int
    """Tokens of its first row."""
    blocks: int
    """New blocks for that row."""


class Placement:
    """Prefix affinity, unless the group with the prefix is much busier than the least loaded."""

    def __init__(self, config: CoreConfig, limits: Limits, groups: Mapping[int, Group]) -> None:
        self._config = config
        self._limits = limits
        self._groups = groups
        self._slack = max(1, config.max_num_seqs // 4)
        """Sequences by which a group may be busier than the least loaded and still be preferred for its prefix."""

    def allowed(self, group: Group, sequence: Sequence, known: int) -> bool:
        """Whether the sequence may go to the group now, when there is room."""
        return sequence.has_mask(known) and self.takes(group, sequence, known)

    def takes(self, group: Group, sequence: Sequence, known: int) -> bool:
        """Whether the sequence may go to the group once it can go on at all."""
        return (
            not group.draining
            and self._limits.fits(sequence.limit, group.pool.num_blocks)
            and may_join(group, sequence, known)
        )

    def fit(self, group: Group, sequence: Sequence, tokens: IntArray, tokens_left: int) -> Fit:
        """What the sequence with these known tokens would take of an allowed group."""
        cached = group.find_prefix(sequence, tokens)
        count = min(tokens_left, len(tokens) - cached.length)
        blocks = -(-(cached.length + count) // self._config.block_size) - len(cached.blocks)
        return Fit(cached, count, blocks)

    def has_room(self, group: Group, fit: Fit) -> bool:
        """Whether slot and blocks are free now."""
        return bool(group.batch.free_slots) and fit.blocks <= group.pool.num_free_beside(fit.cached.blocks)

    def other_takers(self, group: Group, sequence: Sequence, tokens: IntArray) -> dict[int, Fit]:
        """By number: the other groups that could take the sequence now."""
        takers: dict[int, Fit] = {}
        for number, other in self._groups.items():
            if other is group or not other.has_joined or not other.batch.free_slots:
                continue
            if self.allowed(other, sequence, len(tokens)):
                fit = self.fit(other, sequence, tokens, self._config.max_plan_tokens)
                if self.has_room(other, fit):
                    takers[number] = fit
        return takers

    def choose(self, takers: Mapping[int, Fit], planned: Mapping[int, int]) -> int:
        """The number of the best group; `planned` counts sequences that are to go to a group soon."""
        load = {number: self._groups[number].batch.num_running + planned.get(number, 0) for number in takers}
        least = min(load.values())
        near = [number for number in takers if load[number] <= least + self._slack]
        return max(near, key=lambda number: (takers[number].cached.length, -load[number], -number))
