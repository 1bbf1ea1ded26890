"""Each rule of the plan log, broken on purpose: clients or workers of random runs must notice.

The core's own invariants are switched off, so that what is noticed is a wrong token, an unsound read or a hang.
"""

from collections.abc import Callable

import numpy as np
import pytest

from scheduler_svc.core.admission import Admitter
from scheduler_svc.core.batch import Batch
from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.draft import PlanDraft
from scheduler_svc.core.group import CachedPrefix, Group
from scheduler_svc.core.prefix import PrefixMap
from scheduler_svc.core.request import Sequence, State
from scheduler_svc.core.reservation import preempt
from shared.errors import ProtocolError
from shared.types import IntArray, StepPlan, StepResult
from tests.core.random_runs import random_run
from tests.core.reference_worker import ReferenceWorker, Unsound
from tests.core.simulation import Simulation, Violation

NOTICED = (Violation, Unsound, ProtocolError, AssertionError, KeyError, IndexError)
Break = Callable[[pytest.MonkeyPatch], None]


def publish_up_to(count_tokens: Callable[[Batch, int], int]) -> Break:
    """Breaks the publication rule: another count of tokens decides."""

    def publish(self: Group, sequence: Sequence) -> None:
        size = self._config.block_size
        count = min(count_tokens(self.batch, sequence.slot) // size, len(sequence.table))
        if count > sequence.published:
            self._hash(sequence, self.batch.tokens[sequence.slot, : count * size])
            fresh = slice(sequence.published, count)
            hashed = sequence.hashed[fresh]
            sequence.parent = self.pool.prefix.publish(sequence.table[fresh], hashed, sequence.parent)
            sequence.published = count

    return lambda patch: patch.setattr(Group, "publish", publish)


def finish_publishes_known(patch: pytest.MonkeyPatch) -> None:
    """The last token of an ended sequence counts as computed."""
    leave = Group.leave

    def broken(self: Group, sequence: Sequence, state: State) -> None:
        if state is State.ENDED:
            slot, batch = sequence.slot, self.batch
            batch.computed[slot] = min(max(batch.computed[slot], batch.known[slot]), batch.capacity[slot])
        leave(self, sequence, state)

    patch.setattr(Group, "leave", broken)


def victim_has_row(patch: pytest.MonkeyPatch) -> None:
    """A sequence that already got its part of the plan gives way."""

    def broken(self: Admitter, group: Group, draft: PlanDraft) -> None:
        for sequence in list(draft.granted)[:1]:
            preempt(group, sequence, draft, self._life)

    patch.setattr(Admitter, "make_way", broken)


def rewrite_shared(patch: pytest.MonkeyPatch) -> None:
    """A hit covers the whole sequence, whose last token is then written into a published block."""

    def find_prefix(self: Group, sequence: Sequence, tokens: IntArray) -> CachedPrefix:
        self._hash(sequence, tokens)
        blocks, parent = self.pool.prefix.match(sequence.hashed, sequence.request.cache_salt)
        return CachedPrefix(blocks, parent, len(blocks) * self._config.block_size)

    patch.setattr(Group, "find_prefix", find_prefix)


def keep_cache(patch: pytest.MonkeyPatch) -> None:
    """A worker's next epoch begins with the prefix cache of the last one."""
    caches: dict[int, BlockPool] = {}
    create = Group.__init__

    def broken(self: Group, number: int, epoch: int, num_blocks: int, config: CoreConfig) -> None:
        create(self, number, epoch, num_blocks, config)
        self.pool = caches.setdefault(id(config) + number, self.pool)

    patch.setattr(Group, "__init__", broken)


def no_epoch_tag(patch: pytest.MonkeyPatch) -> None:
    """Results of an earlier epoch are taken for the current one's."""
    deliver_late = Simulation.deliver_late

    def broken(self: Simulation) -> None:
        if self.late:
            group, result = self.late[0]
            epoch = self.core._groups[group].epoch if group in self.core._groups else 0
            self.late[0] = group, StepResult(epoch, result.step_id, result.token_ids, result.failed_rows)
        deliver_late(self)

    patch.setattr(Simulation, "deliver_late", broken)


def no_generation(patch: pytest.MonkeyPatch) -> None:
    """The slot alone tells whose token it is."""
    leave = Batch.leave

    def broken(self: Batch, sequence: Sequence) -> None:
        leave(self, sequence)
        self.generations[sequence.slot] -= 1

    patch.setattr(Batch, "leave", broken)


def keep_stale_key(patch: pytest.MonkeyPatch) -> None:
    """A block that is handed out again keeps its entry in the prefix map."""
    patch.setattr(PrefixMap, "forget", lambda self, block: None)


def grammar_ahead(patch: pytest.MonkeyPatch) -> None:
    """A constrained sequence samples again before the mask for its next token is there."""
    decode = PlanDraft.decode

    def broken(self: PlanDraft) -> None:
        for sequence in self._group.batch.running():
            slot = sequence.slot
            if slot not in self._group.prefilling and not self._group.batch.is_drained(slot):
                self._group.batch.set_decoding(slot, True)
        decode(self)

    patch.setattr(PlanDraft, "decode", broken)


RULES: dict[str, Break] = {
    "publish_known": publish_up_to(lambda batch, slot: int(batch.known[slot])),
    "publish_scheduled": publish_up_to(lambda batch, slot: int(batch.computed[slot])),
    "finish_publishes_known": finish_publishes_known,
    "victim_has_row": victim_has_row,
    "rewrite_shared": rewrite_shared,
    "keep_cache": keep_cache,
    "no_epoch_tag": no_epoch_tag,
    "no_generation": no_generation,
    "keep_stale_key": keep_stale_key,
    "grammar_ahead": grammar_ahead,
}


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_noticed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    RULES[rule](monkeypatch)
    with pytest.raises(NOTICED):
        for seed in range(500):
            random_run(seed, check=False)


class SplitWorker(Simulation):
    """Its workers run the rows of a step one after the other."""

    def run_step(self, worker: ReferenceWorker, plan: StepPlan) -> StepResult:
        return worker.execute(plan, split=self.order(len(plan.rows)))

    def order(self, count: int) -> range:
        """Row indices."""
        return range(count)


class ReversedWorker(SplitWorker):
    """Last row first."""

    def order(self, count: int) -> range:
        return range(count - 1, -1, -1)


def test_rows_that_share_blocks_come_producer_first() -> None:
    for seed in range(100):
        random_run(seed, kind=SplitWorker)
    with pytest.raises(Unsound):
        for seed in range(500):
            random_run(seed, kind=ReversedWorker, check=False)


class SkippingWorker(Simulation):
    """Its workers answer some steps that they failed to execute."""

    def run_step(self, worker: ReferenceWorker, plan: StepPlan) -> StepResult:
        if plan.step_id % 5 != 3:
            return worker.execute(plan)
        worker._fold(plan)
        rows = worker._rows(plan)
        sampling = [row.slot for row in rows if worker.slots[row.slot].computed == worker.slots[row.slot].sample_at]
        for slot in sampling:
            worker.slots[slot].sample_at += 1
            worker.slots[slot].last = 1
        return StepResult(plan.epoch, plan.step_id, np.ones(len(sampling), dtype=np.int32))


def test_a_step_that_failed_can_not_be_skipped() -> None:
    with pytest.raises(NOTICED):
        for seed in range(100):
            random_run(seed, kind=SkippingWorker, check=False)
