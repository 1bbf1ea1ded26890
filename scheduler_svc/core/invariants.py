"""What must be true between any two verbs of the core."""

from collections import Counter
from collections.abc import Mapping

from scheduler_svc.core.batch import NEVER
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.group import Group
from scheduler_svc.core.lifecycle import Lifecycle
from scheduler_svc.core.request import Sequence, State


def check_invariants(life: Lifecycle, groups: Mapping[int, Group], config: CoreConfig) -> None:
    """Raises AssertionError naming what does not hold."""
    _check_registry(life, groups)
    for group in groups.values():
        running = group.batch.running()
        group.pool.check([sequence.table for sequence in running])
        _check_slots(group)
        _check_pending(group)
        for sequence in running:
            _check_running(group, sequence, config)


def _check_registry(life: Lifecycle, groups: Mapping[int, Group]) -> None:
    waiting = list(life.queue)
    running = [sequence for group in groups.values() for sequence in group.batch.running()]
    assert sorted(waiting, key=lambda sequence: sequence.rank) == waiting, "the queue is not in order"
    assert all(sequence.state is State.WAITING and not sequence.table for sequence in waiting), "waiting, not idle"
    assert all(sequence.state is State.RUNNING for sequence in running), "in a batch, not running"
    assert life.queue.turns.waiting == Counter(sequence.request.priority for sequence in waiting), "who waits for turns"
    assert life.queue.tokens == sum(sequence.waiting_length for sequence in waiting), "tokens of the queue"
    live = {sequence.request.key: sequence for sequence in waiting + running}
    assert len(live) == len(waiting) + len(running) and live == life.by_key, "registry, queue and batches disagree"
    by_id = [key for samples in life.by_id.values() for key in samples.values()]
    assert sorted(by_id) == sorted(live) and all(life.by_id.values()), "registry by id disagrees"


def _check_slots(group: Group) -> None:
    batch, running = group.batch, group.batch.running()
    free = [slot for slot, sequence in enumerate(batch.sequences) if sequence is None]
    assert sorted(batch.free_slots) == free, "free slots"
    assert not batch.decoding[free].any() and (batch.publish_at[free] == NEVER).all(), "a free slot is not idle"
    assert batch.departures == batch.generations.sum(), "departures"
    stops = Counter(token for sequence in running for token in sequence.stop_ids)
    assert {int(token): int(batch.stop_counts[token]) for token in batch.stop_counts.nonzero()[0]} == stops, "stop ids"
    with_logprobs = sum(sequence.request.logprobs is not None for sequence in running)
    assert batch.num_with_logprobs == with_logprobs, "sequences with logprobs"
    assert group.priorities == Counter(sequence.request.priority for sequence in running), "priorities"
    for held in (group.prefilling, group.masked):
        assert all(batch.at(slot) is sequence for slot, sequence in held.items()), "a slot list is stale"
    assert group.suspects <= set(running), "a suspect is not running"
    assert group.num_constrained == sum(sequence.request.constrained for sequence in running), "constrained"


def _check_pending(group: Group) -> None:
    steps = [plan.step_id for plan in group.pending]
    assert steps == list(range(group.answered + 1, group.step_id + 1)), f"plans without result: {steps}"
    batch = group.batch
    in_flight: Counter[int] = Counter()
    for plan in group.pending:
        fresh = batch.generations[plan.slots] == plan.generations
        in_flight.update(plan.slots[fresh].tolist())
        assert (batch.keys[plan.slots[fresh]] == plan.keys[fresh]).all(), "a row's key is not its slot's"
    for sequence in batch.running():
        expected = int(batch.length[sequence.slot] - batch.known[sequence.slot])
        assert in_flight[sequence.slot] == expected, f"slot {sequence.slot}: rows in flight"


def _check_running(group: Group, sequence: Sequence, config: CoreConfig) -> None:
    batch, slot = group.batch, sequence.slot
    known, length, computed = int(batch.known[slot]), int(batch.length[slot]), int(batch.computed[slot])
    assert sequence.group == group.number and batch.at(slot) is sequence, f"slot {slot}: not its sequence"
    assert len(sequence.request.prompt) <= known <= length <= batch.limit[slot] == sequence.limit, (
        f"slot {slot}: length"
    )
    assert computed <= batch.capacity[slot] == len(sequence.table) * config.block_size, f"slot {slot}: capacity"
    asked = sequence.request.prompt_logprobs is not None
    assert asked or sequence.prompt_logprobs_from == len(sequence.request.prompt), f"slot {slot}: prompt logprobs"
    prefilling = slot in group.prefilling
    if prefilling:
        assert computed < known == length, f"slot {slot}: nothing to prefill"
    else:
        assert computed == length - 1, f"slot {slot}: computed"
    assert sequence.published == min(known, computed) // config.block_size, f"slot {slot}: published"
    can_decode = not prefilling and not batch.is_drained(slot)
    if sequence.request.constrained:
        assert slot not in group.masked or (can_decode and known == length), f"slot {slot}: masked"
    else:
        assert bool(batch.decoding[slot]) == can_decode, f"slot {slot}: decoding"
