"""Several worker groups, their losses, quarantine, and rows that fail."""

import pytest

from scheduler_svc.core import RequeueCause
from shared.errors import InvalidRequest, RequestFailed, Unavailable
from shared.types import FinishReason
from tests.core.reference_worker import POISON
from tests.core.simulation import Simulation, make_simulation

EIGHT = (1, 2, 3, 1, 2, 3, 1, 1)
OTHER = (2, 2, 1, 3, 1, 2, 3, 3)


def running(simulation: Simulation) -> list[int]:
    """Sequences running in each group."""
    groups = simulation.core.load().groups
    return [groups[number].running for number in sorted(groups)]


def test_the_least_loaded_group_takes_what_no_cache_knows() -> None:
    simulation = make_simulation(pools=[16, 16])
    for first in range(1, 5):
        simulation.submit((first, 2, 3), max_tokens=9)
    simulation.plan(0)
    simulation.plan(1)
    assert running(simulation) == [2, 2]
    simulation.settle()


def test_a_cached_prefix_attracts_until_its_group_is_much_busier() -> None:
    simulation = make_simulation(pools=[32, 32], max_num_seqs=8)
    simulation.submit(EIGHT, max_tokens=1)
    simulation.plan(0)
    simulation.settle()
    for seed in range(3):
        simulation.submit(EIGHT, max_tokens=9, seed=seed)
    assert not simulation.plan(1)
    simulation.plan(0)
    assert running(simulation) == [3, 0], "a quarter of the slots more"
    simulation.submit(EIGHT, max_tokens=9)
    simulation.plan(1)
    assert running(simulation) == [3, 1]
    simulation.settle()


def test_a_request_goes_only_where_it_fits() -> None:
    simulation = make_simulation(pools=[4, 16])
    assert simulation.core.context_limit == 24
    key = simulation.submit(EIGHT, max_tokens=8)
    assert not simulation.plan(0)
    assert simulation.plan(1)
    simulation.lose(1, restart=True)
    assert not simulation.plan(0)
    simulation.settle()
    assert simulation.ends[key] is FinishReason.LENGTH


def test_a_draining_worker_gets_nothing_new_and_finishes_what_it_has() -> None:
    simulation = make_simulation(pools=[16, 16])
    simulation.lose(1, restart=True)
    simulation.submit(EIGHT[:3], max_tokens=4)
    simulation.step(0)
    simulation.drain(0)
    simulation.step(0)
    simulation.submit(OTHER[:3], max_tokens=3)
    assert simulation.plan(0) and not simulation.sides[0].plans[-1].admitted
    simulation.open(1)
    assert simulation.plan(1) and len(simulation.sides[1].plans[-1].admitted) == 1
    simulation.settle()


def test_the_sequences_of_a_draining_worker_move_where_there_is_room() -> None:
    simulation = make_simulation(pools=[16, 16], max_num_seqs=2)
    keys = [simulation.submit(prompt, max_tokens=6) for prompt in (EIGHT, OTHER, EIGHT[1:])]
    for group in (0, 1):
        simulation.step(group, count=3)
    assert running(simulation) == [2, 1]
    simulation.drain(0)
    simulation.step(0)
    assert simulation.requeued == [(keys[0], RequeueCause.DRAINED)], "one fits, the more important one"
    assert running(simulation) == [1, 1]
    simulation.step(0)
    assert len(simulation.requeued) == 1, "nobody moves while another one waits for room"
    simulation.plan(1)
    assert running(simulation) == [1, 2]
    simulation.settle()
    assert all(how is FinishReason.LENGTH for how in simulation.ends.values())
    assert simulation.core.load().counters.requeued == len(simulation.requeued)


def test_constrained_sequences_move_too() -> None:
    simulation = make_simulation(pools=[16, 16])
    key = simulation.submit(EIGHT, max_tokens=6, constrained=True)
    simulation.send_masks()
    simulation.step(0, count=2)
    simulation.drain(0)
    simulation.send_masks()
    simulation.step(0)
    assert running(simulation) == [0, 0]
    simulation.settle()
    assert simulation.ends[key] is FinishReason.LENGTH


def test_two_draining_workers_give_each_other_nothing() -> None:
    simulation = make_simulation(pools=[16, 16])
    for prompt in (EIGHT, OTHER):
        simulation.submit(prompt, max_tokens=6)
    simulation.step(0)
    simulation.step(1)
    simulation.drain(1)
    simulation.step(1)
    simulation.step(0)
    simulation.drain(0)
    simulation.step(0)
    assert running(simulation) == [2, 0] and len(simulation.requeued) == 1
    simulation.settle()


def test_a_group_that_has_not_answered_takes_nobody_from_the_others() -> None:
    """Another scheduler may hold it, or nobody may be there."""
    simulation = make_simulation(pools=[16])
    for seed in range(4):
        simulation.submit(EIGHT[:3], max_tokens=3, seed=seed)
    simulation.core.worker_ready(1, 64)
    simulation.plan(0)
    assert running(simulation) == [4, 0]
    assert simulation.core.context_limit == 24
    simulation.collect(simulation.core.worker_lost(1))
    simulation.settle()


def test_what_fits_only_an_absent_group_waits_until_that_is_forgotten() -> None:
    simulation = make_simulation(pools=[4, 16])
    held = simulation.submit(EIGHT, max_tokens=8)
    simulation.step(1)
    simulation.lose(1, restart=True)
    late = simulation.submit(EIGHT, max_tokens=7)
    shorter = simulation.submit(EIGHT[:5])
    small = simulation.submit(EIGHT[:3], max_tokens=2)
    assert simulation.core.context_limit == 24, "it may return"
    while small in simulation.jobs:
        simulation.step(0)
    assert set(simulation.jobs) == {held, late, shorter}
    simulation.remove(1)
    assert isinstance(simulation.ends[held], Unavailable) and isinstance(simulation.ends[late], Unavailable)
    assert simulation.core.context_limit == 9
    with pytest.raises(InvalidRequest, match="largest pool has 4"):
        simulation.submit(EIGHT[:3], max_tokens=7)
    simulation.settle()
    assert simulation.ends[shorter] is FinishReason.LENGTH


def test_a_group_that_comes_later_takes_its_share() -> None:
    simulation = make_simulation(pools=[4], max_num_seqs=2)
    keys = [simulation.submit(EIGHT[:3], max_tokens=4, seed=seed) for seed in range(4)]
    simulation.step(0)
    group = simulation.add(16)
    simulation.step(group)
    assert running(simulation)[group] == 2
    keys.append(simulation.submit(EIGHT, max_tokens=9))
    simulation.settle()
    assert all(simulation.ends[key] is FinishReason.LENGTH for key in keys)


def test_epochs_only_rise_and_late_results_are_ignored() -> None:
    simulation = make_simulation(pools=[16, 16])
    epochs = [group.epoch for group in simulation.core._groups.values()]
    simulation.submit(EIGHT[:3], max_tokens=3)
    simulation.plan(0)
    simulation.execute(0)
    simulation.lose(0, restart=True)
    simulation.deliver_late()
    epochs += [simulation.core.worker_ready(0, 16), simulation.core.worker_ready(0, 16)]
    assert sorted(set(epochs)) == epochs
    simulation.settle()


def test_the_sequences_of_a_lost_worker_go_on_elsewhere_ahead_of_later_ones() -> None:
    simulation = make_simulation(pools=[16, 16], max_num_seqs=2)
    keys = [simulation.submit(prompt, max_tokens=6) for prompt in (EIGHT, OTHER)]
    for group in (0, 1):
        simulation.step(group, count=3)
    later = simulation.submit((3, 3), max_tokens=1)
    simulation.lose(0, restart=True)
    assert [sequence.request.key for sequence in simulation.core._life.queue] == [keys[0], later]
    while simulation.jobs:
        simulation.step(1)
    assert all(how is FinishReason.LENGTH for how in simulation.ends.values())
    assert simulation.core.load().counters.requeued == 1
    assert simulation.requeued == [(keys[0], RequeueCause.WORKER_LOST)]


def lose_in_flight(simulation: Simulation, killer: int) -> list[int]:
    """Steps until a plan with a row of `killer` is out, then the worker dies. The keys that were beside it."""
    while True:
        simulation.plan(0)
        sequence = simulation.core._life.by_key[killer]
        if sequence.group is not None and simulation.core._groups[0].in_flight(sequence):
            beside = [other.request.key for other in simulation.core._groups[0].batch.running()]
            simulation.lose(0, restart=True)
            simulation.open(0)
            return beside
        simulation.execute(0)
        simulation.deliver(0)


def test_a_request_that_kills_workers_ends_alone() -> None:
    simulation = make_simulation(pools=[32], max_num_batched_tokens=32)
    innocents = [simulation.submit(prompt[:3], max_tokens=4) for prompt in (EIGHT, OTHER, EIGHT[1:])]
    killer = simulation.submit(OTHER[2:5], max_tokens=4)
    beside = [lose_in_flight(simulation, killer) for _ in range(4)]
    assert len(beside[0]) == len(beside[1]) == 4, "two losses hit them all"
    for keys in beside[2:]:
        suspects = [key for key in keys if key in simulation.jobs and not simulation.jobs[key].received]
        assert not suspects, "a suspect has no other suspect beside it"
    assert isinstance(simulation.ends[killer], RequestFailed)
    simulation.settle()
    assert all(simulation.ends[key] is FinishReason.LENGTH for key in innocents)
    assert simulation.core.load().counters.quarantined == 1


def test_losses_count_in_the_middle_of_a_prompt_too() -> None:
    simulation = make_simulation(max_num_batched_tokens=4)
    key = simulation.submit(EIGHT, max_tokens=2)
    for _ in range(4):
        assert key not in simulation.ends
        simulation.plan(0)
        simulation.lose(0, restart=True)
        simulation.open(0)
    assert isinstance(simulation.ends[key], RequestFailed)


def test_losses_with_tokens_between_them_do_not_count_together() -> None:
    simulation = make_simulation(depths=[1])
    key = simulation.submit(EIGHT[:3], max_tokens=10)
    for _ in range(8):
        simulation.step()
        simulation.plan(0)
        simulation.lose(0, restart=True)
        simulation.open(0)
    simulation.settle()
    assert simulation.ends[key] is FinishReason.LENGTH


def test_losses_that_hit_nothing_in_flight_do_not_count() -> None:
    simulation = make_simulation(max_num_batched_tokens=4)
    key = simulation.submit(EIGHT, max_tokens=2)
    for _ in range(8):
        simulation.step()
        simulation.lose(0, restart=True)
        simulation.open(0)
    simulation.settle()
    assert simulation.ends[key] is FinishReason.LENGTH


def test_a_request_without_finite_logits_ends_alone_and_its_blocks_are_zeroed() -> None:
    simulation = make_simulation(pools=[10], max_num_batched_tokens=16)
    poisoned = simulation.submit((1, 2, 3, POISON, 2, 2), max_tokens=3)
    sharing = simulation.submit((1, 2, 3, 2, 2, 2), max_tokens=3)
    simulation.step()
    assert isinstance(simulation.ends[poisoned], RequestFailed)
    assert simulation.sides[0].tainted
    simulation.settle()
    assert simulation.ends[sharing] is FinishReason.LENGTH
    for prompt in (EIGHT, OTHER, (3, *EIGHT), (3, *OTHER)):
        simulation.submit(prompt, max_tokens=2)
    simulation.settle()
    assert not simulation.sides[0].tainted, "all of them were handed out again, zeroed"


@pytest.mark.parametrize("chunk", [4, 16])
def test_who_shared_blocks_with_a_failed_request_is_computed_again(chunk: int) -> None:
    simulation = make_simulation(pools=[24], max_num_batched_tokens=chunk, depths=[3])
    keys = [simulation.submit(EIGHT, max_tokens=3, seed=seed) for seed in range(3)]
    simulation.sides[0].broken_row = 0
    simulation.settle()
    failed = [key for key in keys if isinstance(simulation.ends[key], RequestFailed)]
    assert len(failed) == 1
    assert simulation.core.load().counters.failed_rows == 1
    assert {cause for _, cause in simulation.requeued} <= {RequeueCause.TAINTED}
    assert failed[0] not in dict(simulation.requeued)
