"""Order of a plan, preemption, admission, masks and ends, one rule a test."""

from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core import CoreConfig, Ended, Request, RequeueCause, Scheduler
from shared.errors import InvalidRequest, ProtocolError, QueueFull, StartupError, Unavailable
from shared.logit_rules import NO_RULES, LogitRules
from shared.types import FinishReason, StepPlan, StepResult
from shared.wire import plan_to_pb
from tests.core.reference_worker import allowed_tokens
from tests.core.simulation import Simulation, make_simulation

EIGHT = (1, 2, 3, 1, 2, 3, 1, 1)
OTHER = (2, 2, 1, 3, 1, 2, 3, 3)


def last_plan(simulation: Simulation, group: int = 0) -> StepPlan:
    """The plan that was sent last."""
    return simulation.sides[group].plans[-1]


def test_decode_rows_come_first_then_chunks_of_known_tokens() -> None:
    simulation = make_simulation(max_num_batched_tokens=6)
    simulation.submit(EIGHT[:2], max_tokens=9)
    simulation.submit(OTHER[:2], max_tokens=9)
    simulation.step()
    simulation.submit(EIGHT[2:], max_tokens=9)
    simulation.plan(0)
    assert last_plan(simulation).rows.tolist() == [[0, 1, 0], [1, 1, 0], [2, 4, 4]]
    assert last_plan(simulation).token_ids.tolist() == [3, 1, 2, 3]
    simulation.plan(0)
    assert last_plan(simulation).rows.tolist() == [[0, 1, 0], [1, 1, 0], [2, 2, 2]]
    simulation.settle()


def test_nothing_is_planned_past_the_last_token() -> None:
    simulation = make_simulation(depths=[9])
    simulation.submit(EIGHT[:4], max_tokens=3)
    for _ in range(3):
        assert simulation.plan(0)
    assert not simulation.plan(0)
    simulation.settle()


def test_the_least_important_gives_way_and_keeps_its_place() -> None:
    simulation = make_simulation(pools=[8], max_num_seqs=3, depths=[1])
    keys = [simulation.submit(prompt[:4], max_tokens=8) for prompt in (EIGHT, OTHER, EIGHT[2:])]
    while not simulation.core.load().counters.preemptions:
        simulation.step()
    latecomer = simulation.submit((3, 3), max_tokens=1)
    waiting = [sequence.request.key for sequence in simulation.core._life.queue]
    assert waiting == [keys[2], latecomer]
    simulation.settle()


def test_a_plan_that_preempted_admits_nobody() -> None:
    simulation = make_simulation(pools=[8], depths=[1])
    for prompt in (EIGHT, OTHER, EIGHT[2:]):
        simulation.submit(prompt[:4], max_tokens=8)
    preemptions = 0
    while simulation.jobs:
        simulation.submit((3,), max_tokens=1)
        simulation.plan(0)
        before, preemptions = preemptions, simulation.core.load().counters.preemptions
        if preemptions > before:
            assert not last_plan(simulation).admitted
            break
        simulation.step()
    assert preemptions
    simulation.settle()


def test_a_sequence_whose_last_row_is_out_is_no_victim() -> None:
    simulation = make_simulation(pools=[3], max_num_seqs=1, depths=[3])
    simulation.submit(EIGHT[:3], max_tokens=2)
    simulation.plan(0)
    simulation.plan(0)
    urgent = simulation.submit(OTHER[:3], max_tokens=1, priority=-1)
    assert not simulation.plan(0)
    assert simulation.core.load().counters.preemptions == 0
    simulation.settle()
    assert list(simulation.ends) == [0, urgent]


def test_an_urgent_head_takes_the_slot_of_the_least_important() -> None:
    simulation = make_simulation(max_num_seqs=2, depths=[1])
    kept = simulation.submit(EIGHT[:4], max_tokens=6, priority=1)
    victim = simulation.submit(OTHER[:4], max_tokens=6, priority=2)
    simulation.step(count=2)
    urgent = simulation.submit(EIGHT[:2], max_tokens=2)
    simulation.plan(0)
    assert not last_plan(simulation).admitted and len(last_plan(simulation).rows) == 1
    simulation.settle()
    assert simulation.core.load().counters.preemptions == 1
    assert simulation.requeued == [(victim, RequeueCause.PREEMPTED)]
    assert list(simulation.ends) == [urgent, kept, victim]


def test_a_head_that_does_not_fit_is_passed_for_a_bounded_number_of_steps() -> None:
    simulation = make_simulation(pools=[8], look_past_steps=2, depths=[1], max_num_batched_tokens=16)
    simulation.submit(OTHER, max_tokens=8)
    simulation.step()
    large = simulation.submit((3, *EIGHT, 1), max_tokens=1)
    order = []
    for _ in range(5):
        simulation.submit((3,), max_tokens=1)
        simulation.plan(0)
        order.append(len(last_plan(simulation).admitted))
        simulation.step()
    assert order == [1, 1, 0, 0, 0]
    simulation.settle()
    assert list(simulation.ends).index(large) == 3


def test_constrained_sequences_wait_for_each_mask() -> None:
    simulation = make_simulation(depths=[4])
    key = simulation.submit(EIGHT[:3], max_tokens=3, constrained=True)
    assert not simulation.plan(0)
    simulation.send_masks()
    assert simulation.plan(0) and last_plan(simulation).masks[0].allowed == allowed_tokens(EIGHT[:3])
    assert not simulation.plan(0)
    simulation.execute(0)
    simulation.deliver(0)
    assert not simulation.plan(0)
    with pytest.raises(ProtocolError, match="mask for output token 0 of sequence 0, which has 1"):
        simulation.core.mask_ready(key, 0, bytes(1))
    with pytest.raises(ProtocolError, match="mask of 2 bytes for 8 tokens"):
        simulation.core.mask_ready(key, 1, bytes(2))
    simulation.send_masks()
    assert simulation.plan(0)
    simulation.settle()
    simulation.core.mask_ready(key, 3, bytes(1))


def send_mask(simulation: Simulation, key: int) -> None:
    job = simulation.jobs[key]
    tokens = (*job.request.prompt.tolist(), *job.received)
    job.masks_sent = len(job.received)
    simulation.core.mask_ready(key, job.masks_sent, allowed_tokens(tokens))


def test_constrained_sequences_step_together_if_the_caller_is_patient() -> None:
    """Else each would get a step of its own, and all of them a token only after as many steps."""
    simulation = make_simulation(depths=[4])
    keys = [simulation.submit(EIGHT[:3], max_tokens=6, constrained=True) for _ in range(2)]
    simulation.send_masks()
    simulation.step()
    send_mask(simulation, keys[0])
    assert not simulation.plan(0, patient=True) and simulation.core.is_gathering(0)
    send_mask(simulation, keys[1])
    assert not simulation.core.is_gathering(0)
    assert simulation.plan(0, patient=True) and len(last_plan(simulation).rows) == 2
    simulation.execute(0)
    simulation.deliver(0)
    send_mask(simulation, keys[0])
    assert simulation.plan(0) and len(last_plan(simulation).rows) == 1, "the caller's patience is over"
    send_mask(simulation, keys[1])
    assert not simulation.plan(0, patient=True), "the first one's row is out and comes back"
    simulation.abort(keys[0])
    assert simulation.plan(0, patient=True), "nobody to wait for"
    simulation.settle()


def test_nobody_waits_for_whom_the_plan_has_no_room() -> None:
    """Five masks of 2,000 bytes fit; of seven sequences the first five need not wait for the others."""
    config = CoreConfig(
        vocabulary_size=16_000,
        max_model_length=64,
        block_size=16,
        max_num_seqs=7,
        max_num_batched_tokens=100,
        max_plan_bytes=2 * (5 * 2016 + 7 * 24),
        hash_seed=1,
    )
    core = Scheduler(config)
    core.worker_ready(0, 64)
    for key in range(7):
        core.submit(Request(key, f"{key}", 0, np.arange(1, 4, dtype=np.int32), max_tokens=9, constrained=True))
        core.mask_ready(key, 0, bytes(2000))
        plan = core.schedule(0)
        assert plan is not None
        core.update(0, StepResult(plan.epoch, plan.step_id, np.array([7], dtype=np.int32)))
    for key in range(5):
        assert not core.schedule(0, patient=True)
        core.mask_ready(key, 1, bytes(2000))
    plan = core.schedule(0, patient=True)
    assert plan is not None and len(plan.masks) == 5


def test_nobody_waits_where_others_decode() -> None:
    simulation = make_simulation(depths=[4])
    simulation.submit(EIGHT, max_tokens=9)
    keys = [simulation.submit(EIGHT[:3], max_tokens=6, constrained=True) for _ in range(2)]
    simulation.send_masks()
    simulation.step(count=2)
    send_mask(simulation, keys[0])
    assert simulation.plan(0, patient=True) and len(last_plan(simulation).rows) == 2
    simulation.settle()


def test_stop_tokens_count_from_min_tokens_on() -> None:
    config = CoreConfig(
        vocabulary_size=8, max_model_length=24, block_size=2, max_num_seqs=2, max_num_batched_tokens=8,
        hash_seed=1,
    )  # fmt: skip
    core = Scheduler(config)
    core.worker_ready(0, 16)
    prompt = np.array(EIGHT, dtype=np.int32)
    core.submit(Request(5, "a", 0, prompt, max_tokens=9, min_tokens=1, stop_token_ids=(0, 3)))
    outputs = []
    for token in (3, 3):
        plan = core.schedule(0)
        assert plan is not None
        outputs.append(core.update(0, StepResult(plan.epoch, plan.step_id, np.array([token], dtype=np.int32))))
    assert outputs[0].started == ((5, 0),) and not outputs[0].ended
    (ended,) = outputs[1].ended
    assert (ended.key, ended.how, ended.stop_token_id) == (5, FinishReason.STOP_TOKEN, 3)
    assert outputs[1].keys.tolist() == [5] and outputs[1].token_ids.tolist() == [3]


def test_a_resumed_request_that_is_over_ends_at_once() -> None:
    simulation = make_simulation()
    key = simulation.submit(EIGHT[:3], given=9, max_tokens=2)
    assert simulation.ends == {key: FinishReason.LENGTH}
    output = np.array([3], dtype=np.int32)
    request = Request(9, "b", 0, np.array(EIGHT, dtype=np.int32), output, stop_token_ids=(3,), min_tokens=1)
    simulation.core.submit(request)
    assert not simulation.core.take_outputs().ended, "a stop token before min_tokens is a token like others"
    simulation.core.abort(9)
    simulation.core.submit(Request(10, "b", 0, np.array(EIGHT, dtype=np.int32), output, stop_token_ids=(3,)))
    (ended,) = simulation.core.take_outputs().ended
    assert (ended.how, ended.stop_token_id) == (FinishReason.STOP_TOKEN, 3)
    simulation.settle()


def test_cached_tokens_are_told_once_and_count_the_prompt_alone() -> None:
    simulation = make_simulation()
    simulation.submit(EIGHT[:5], max_tokens=8)
    simulation.settle()
    key = simulation.submit(EIGHT[:5], given=5, max_tokens=8)
    job = simulation.jobs[key]
    simulation.plan(0)
    assert last_plan(simulation).admitted[0].cached_length == 8
    simulation.settle()
    assert job.cached == 5


def test_blocks_that_the_more_important_lacks_are_not_for_others() -> None:
    simulation = make_simulation(pools=[32], max_model_length=24, depths=[9])
    simulation.submit((3,), max_tokens=9, priority=1)
    simulation.plan(0)
    simulation.submit((*EIGHT, *OTHER), max_tokens=1)
    simulation.plan(0)
    pool = simulation.core._groups[0].pool
    lent = pool.take(pool.num_free - 1)
    assert not simulation.plan(0), "both need blocks, three and one, one is free and one could be freed"
    pool.release(lent)
    simulation.settle()


def test_a_full_queue_refuses_and_changes_nothing() -> None:
    simulation = make_simulation(max_queue=2)
    simulation.submit(EIGHT)
    simulation.submit(EIGHT)
    with pytest.raises(QueueFull, match="2 requests"):
        simulation.submit(EIGHT)
    assert simulation.core.load().queued == 2
    assert simulation.core.keys_of("request 2") == []
    simulation.submit(EIGHT, again=True)  # a core that is gone had accepted it
    simulation.settle()


def test_tokens_that_wait_are_bounded_too() -> None:
    simulation = make_simulation(max_queue_tokens=10)
    for _ in range(3):  # whoever finds nobody waiting, too
        simulation.submit((1,) * 12, max_tokens=1)
        with pytest.raises(QueueFull, match="12 tokens"):
            simulation.submit((1,))
        simulation.settle()
    simulation.submit(EIGHT)
    simulation.submit((1, 2))
    with pytest.raises(QueueFull, match="10 tokens"):
        simulation.submit((1,))
    simulation.submit(EIGHT, again=True)
    simulation.settle()


def test_only_who_was_never_admitted_can_be_too_late() -> None:
    simulation = make_simulation(max_num_seqs=1)
    running, waiting = simulation.submit(EIGHT), simulation.submit(EIGHT)
    simulation.plan(0)
    late = QueueFull("too late")
    assert not simulation.core.expire(running, late) and simulation.core.expire(waiting, late)
    assert not simulation.core.expire(waiting, late), "it is forgotten"
    outputs = simulation.core.take_outputs()
    assert outputs.ended == (Ended(waiting, late),)
    del simulation.jobs[waiting]
    simulation.collect(replace(outputs, ended=()))
    simulation.lose(0, restart=True)
    assert not simulation.core.expire(running, late), "it waits for its replay"
    simulation.settle()


@pytest.mark.parametrize(
    ("step_id", "token_ids", "failed_rows", "problem"),
    [
        (3, [1], [], "result of step 3 out of order: expected 2"),
        (2, [1, 2], [], "has 2 tokens for 1 sampling rows"),
        (2, [8], [], "a token outside the vocabulary"),
        (2, [-1], [], "a token outside the vocabulary"),
        (2, [1], [1], "failed rows that are not in the plan"),
    ],
)
def test_a_wrong_result_changes_nothing(
    step_id: int, token_ids: list[int], failed_rows: list[int], problem: str
) -> None:
    simulation = make_simulation()
    simulation.submit(EIGHT[:3], max_tokens=3)
    simulation.plan(0)
    ids, failed = np.array(token_ids, dtype=np.int32), np.array(failed_rows, dtype=np.int32)
    with pytest.raises(ProtocolError, match=problem):
        simulation.core.update(0, StepResult(1, step_id, ids, failed))
    simulation.core.check_invariants()
    simulation.settle()


def test_heartbeats_count_in_the_log_and_carry_nothing() -> None:
    simulation = make_simulation()
    simulation.submit(EIGHT[:3], max_tokens=3)
    simulation.plan(0)
    simulation.heartbeat(0)
    assert last_plan(simulation).step_id == 3 and not len(last_plan(simulation).rows)
    simulation.settle()


def test_end_all_tells_everybody() -> None:
    core = make_simulation(max_num_seqs=1).core
    for key in range(3):
        core.submit(Request(key, "a", key, np.array(EIGHT, dtype=np.int32)))
    core.schedule(0)
    error = Unavailable("no worker")
    ended = core.end_all(error).ended
    assert {(one.key, one.how) for one in ended} == {(key, error) for key in range(3)}
    core.check_invariants()
    assert core.load().groups[0].free_blocks == 16


def test_a_plan_stays_under_its_bytes() -> None:
    vocabulary, block_size, most = 4096, 16, 1 << 15
    config = CoreConfig(
        vocabulary_size=vocabulary, max_model_length=4096, block_size=block_size, max_num_seqs=192,
        max_num_batched_tokens=1 << 14, max_plan_bytes=most, hash_seed=1,
    )  # fmt: skip
    core = Scheduler(config)
    core.worker_ready(0, 1 << 16)
    long = np.arange(4000, dtype=np.int32)
    for key in range(200):
        rules = LogitRules(repetition_penalty=1.5, allowed=bytes(vocabulary // 8)) if key % 3 == 2 else NO_RULES
        prompt = long[: 4000 - key % 7]
        core.submit(Request(key, f"{key}", 0, prompt, max_tokens=4, constrained=key % 2 == 1, rules=rules))
    sizes, alive = [], set(range(200))
    while alive:
        for key in [key for key in alive if key % 2]:
            sequence, known = core._life.by_key[key], known_tokens(core, key)
            if not sequence.has_mask(known):
                core.mask_ready(key, known - len(sequence.request.prompt), bytes(vocabulary // 8))
        plan = core.schedule(0)
        assert plan is not None
        sizes.append(len(plan_to_pb(plan, 1).SerializeToString()))
        sampling = core._groups[0].pending[0].slots
        result = StepResult(plan.epoch, plan.step_id, np.full(len(sampling), 5, dtype=np.int32))
        alive -= {ended.key for ended in core.update(0, result).ended}
        core.check_invariants()
    assert max(sizes) <= most and max(sizes) > most // 4


def known_tokens(core: Scheduler, key: int) -> int:
    """Of a live sequence, on group 0 if it runs."""
    sequence = core._life.by_key[key]
    return sequence.waiting_length if sequence.group is None else int(core._groups[0].batch.known[sequence.slot])


def test_contradictions_are_refused_at_start() -> None:
    values = {"vocabulary_size": 8, "max_model_length": 24, "block_size": 2, "hash_seed": 1}
    with pytest.raises(StartupError, match=r"max_num_batched_tokens \(3\) must be at least max_num_seqs \(4\)"):
        CoreConfig(max_num_seqs=4, max_num_batched_tokens=3, **values)
    with pytest.raises(StartupError, match="block_size must be at least 1"):
        CoreConfig(max_num_seqs=1, max_num_batched_tokens=1, **{**values, "block_size": 0})
    with pytest.raises(StartupError, match="max_plan_bytes must be at least"):
        CoreConfig(max_num_seqs=1, max_num_batched_tokens=1, max_plan_bytes=10, **values)


def test_before_the_first_worker_the_models_length_decides() -> None:
    config = make_simulation().config
    core = Scheduler(config)
    assert core.context_limit == config.max_model_length and core.schedule(0) is None
    fits, large = np.array(EIGHT[:4], dtype=np.int32), np.array(EIGHT, dtype=np.int32)
    core.submit(Request(1, "fits", 0, fits))
    core.submit(Request(2, "large", 0, np.append(large, large[:1])))
    core.submit(Request(3, "long", 0, fits, max_tokens=8))
    core.worker_ready(0, 4)
    assert core.context_limit == config.max_model_length, "another scheduler may hold the worker"
    plan = core.heartbeat(0)
    assert core.update(0, StepResult(plan.epoch, plan.step_id)).is_empty
    assert core.context_limit == 9
    ended = core.take_outputs().ended
    assert [(one.key, type(one.how)) for one in ended] == [(2, InvalidRequest), (3, InvalidRequest)]
    assert core.load().queued == 1
    core.check_invariants()
