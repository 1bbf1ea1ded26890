"""What others' schedulers got wrong in public, by the number of the failure in the project's list."""

from collections.abc import Iterator

import numpy as np
import pytest

from scheduler_svc.core import prefix
from shared.errors import DuplicateRequest, InvalidRequest
from shared.types import FinishReason
from tests.core.simulation import Simulation, make_simulation

EIGHT = (1, 2, 3, 1, 2, 3, 1, 1)
OTHER = (2, 2, 1, 3, 1, 2, 3, 3)


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    simulation = make_simulation()
    yield simulation
    simulation.settle()


def test_1_prompt_that_fills_the_pool() -> None:
    simulation = make_simulation(pools=[4])
    with pytest.raises(InvalidRequest, match=r"prompt: has 9 tokens, .* limit of 9"):
        simulation.submit((*EIGHT, 1), max_tokens=1)
    with pytest.raises(InvalidRequest, match=r"max_tokens: 3 .* needs 5 K/V blocks .* has 4: at most 2 fit"):
        simulation.submit(EIGHT[:7], max_tokens=3)
    keys = [simulation.submit(EIGHT[:7], max_tokens=2), simulation.submit(EIGHT, max_tokens=1)]
    simulation.settle()
    assert simulation.ends == dict.fromkeys(keys, FinishReason.LENGTH)


def test_2_prompt_larger_than_the_pool_does_not_block_the_queue() -> None:
    simulation = make_simulation(pools=[4])
    with pytest.raises(InvalidRequest, match="prompt"):
        simulation.submit((*EIGHT, 1, 2), max_tokens=1)
    simulation.submit(EIGHT[:3], max_tokens=3)
    simulation.settle()


def test_3_same_prompt_twice_of_whole_blocks_computes_a_token(simulation: Simulation) -> None:
    simulation.submit(EIGHT, max_tokens=1)
    simulation.step()
    key = simulation.submit(EIGHT, max_tokens=1)
    simulation.plan(0)
    plan = simulation.sides[0].plans[0]
    assert plan.admitted[0].cached_length == 6 and plan.rows.tolist() == [[plan.admitted[0].slot, 2, 2]]
    simulation.settle()
    assert simulation.ends[key] is FinishReason.LENGTH


def test_4_a_reused_block_is_found_no_more() -> None:
    simulation = make_simulation(pools=[5])
    simulation.submit(EIGHT, max_tokens=1)
    simulation.step()
    simulation.submit((3, *EIGHT), max_tokens=1)
    simulation.step(count=2)
    assert not simulation.jobs
    simulation.submit(EIGHT, max_tokens=1)
    simulation.plan(0)
    assert simulation.sides[0].plans[0].admitted[0].cached_length == 0
    simulation.settle()


def test_5_equal_prompts_of_one_step_share_blocks() -> None:
    simulation = make_simulation(max_num_batched_tokens=16)
    simulation.submit(EIGHT, max_tokens=4)
    simulation.submit(EIGHT, max_tokens=4, seed=1)
    simulation.plan(0)
    first, second = simulation.sides[0].plans[0].admitted
    assert len(second.block_ids) == 3
    tables: dict[int, list[int]] = {first.slot: [], second.slot: []}
    for slot, block in simulation.sides[0].plans[0].grown.tolist():
        tables[slot].append(block)
    assert tables[first.slot][:3] == second.block_ids.tolist() and len(tables[second.slot]) == 1
    simulation.settle()


def test_6_abort_and_reuse_of_the_id_while_the_result_is_out(simulation: Simulation) -> None:
    key = simulation.submit(EIGHT[:3], request_id="same", max_tokens=9)
    simulation.plan(0)
    simulation.plan(0)
    simulation.abort(key)
    simulation.submit(OTHER, request_id="same", max_tokens=3)
    simulation.step(count=2)
    assert simulation.core.load().counters.stale_rows == 2


def test_6_preempted_while_the_result_is_out() -> None:
    simulation = make_simulation(pools=[6], depths=[3])
    first = simulation.submit(EIGHT[:4], max_tokens=8)
    simulation.submit(OTHER[:4], max_tokens=4, priority=1)
    for _ in range(3):
        simulation.plan(0)
    for _ in range(20):
        simulation.step()
        simulation.core.check_invariants()
    counters = simulation.core.load().counters
    assert counters.preemptions and counters.stale_rows
    assert simulation.ends.keys() >= {first}
    simulation.settle()


def test_7_a_plan_says_which_tokens_a_resumed_sequence_computes() -> None:
    simulation = make_simulation(pools=[6], depths=[1])
    simulation.submit(EIGHT[:4], max_tokens=8)
    simulation.submit(OTHER[:4], max_tokens=4, priority=1)
    admissions = []
    while simulation.jobs:
        if simulation.plan(0):
            plan = simulation.sides[0].plans[0]
            rows = {slot: (count, known) for slot, count, known in plan.rows.tolist()}
            admissions += [(admission, rows[admission.slot]) for admission in plan.admitted]
        simulation.execute(0)
        simulation.deliver(0)
    again, (count, known) = admissions[2]
    assert again.known_length > again.prompt_length == 4
    assert count == known == again.known_length - again.cached_length


def test_8_abort_between_two_chunks_of_a_prefill() -> None:
    simulation = make_simulation(max_num_batched_tokens=4)
    key = simulation.submit(EIGHT, max_tokens=5)
    simulation.step()
    simulation.abort(key)
    assert simulation.core.load().groups[0].free_blocks == 16
    assert not simulation.plan(0)


def test_9_decoding_goes_on_while_prompts_arrive_at_every_step() -> None:
    simulation = make_simulation(depths=[1])
    key = simulation.submit(EIGHT[:1], max_tokens=12)
    job = simulation.jobs[key]
    simulation.step()
    for step in range(11):
        simulation.submit(OTHER, max_tokens=1)
        simulation.step()
        assert len(job.received) == step + 2
    simulation.settle()


def test_10_never_more_running_than_max_num_seqs() -> None:
    simulation = make_simulation(max_num_seqs=2)
    for seed in range(6):
        simulation.submit(EIGHT[:3], max_tokens=3, seed=seed)
    while simulation.jobs:
        simulation.step()
        assert simulation.core.load().groups[0].running <= 2


def test_11_nothing_to_do_is_the_callers_mistake(simulation: Simulation) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens: must be at least 1"):
        simulation.submit(EIGHT, max_tokens=0)
    with pytest.raises(InvalidRequest, match="prompt: must have at least one token"):
        simulation.submit((), max_tokens=1)


@pytest.mark.parametrize("token", [-1, 8, 2**31 - 1])
@pytest.mark.parametrize("field", ["prompt", "stop_token_ids"])
def test_12_ids_out_of_range(simulation: Simulation, field: str, token: int) -> None:
    fields = {"prompt": (1, token)} if field == "prompt" else {"prompt": (1, 2), "stop_token_ids": (token,)}
    with pytest.raises(InvalidRequest, match=rf"{field}: token id {token} is not within \[0, 8\)"):
        simulation.submit(**fields)


def test_13_prompts_around_the_context_limit() -> None:
    simulation = make_simulation(max_model_length=10)
    assert simulation.core.context_limit == 10
    key = simulation.submit((*EIGHT, 1), max_tokens=5)
    for prompt in ((*EIGHT, 1, 2), (*EIGHT, 1, 2, 3)):
        with pytest.raises(InvalidRequest, match=r"prompt: .* must be shorter than the context limit of 10"):
            simulation.submit(prompt)
    job = simulation.jobs[key]
    simulation.settle()
    assert simulation.ends[key] is FinishReason.LENGTH and len(job.received) == 1


def test_20_a_live_request_id_is_refused_once_more(simulation: Simulation) -> None:
    key = simulation.submit(EIGHT, request_id="a", max_tokens=2)
    with pytest.raises(DuplicateRequest, match="'a'"):
        simulation.submit(OTHER, request_id="a")
    assert simulation.core.keys_of("a") == [key]
    simulation.settle()
    simulation.submit(OTHER, request_id="a", max_tokens=1)


def test_22_more_important_first_and_equals_never_preempt() -> None:
    simulation = make_simulation(max_num_seqs=1, depths=[1])
    simulation.submit(EIGHT[:4], max_tokens=4)
    simulation.step()
    equal = simulation.submit(OTHER[:4], max_tokens=2)
    simulation.step()
    assert simulation.core.load().counters.preemptions == 0
    urgent = simulation.submit(OTHER[:2], max_tokens=2, priority=-1)
    simulation.settle()
    assert simulation.core.load().counters.preemptions == 1
    assert list(simulation.ends) == [urgent, 0, equal]


def test_23_equal_digests_of_different_tokens_are_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "xxh3_128_digest", lambda data, seed: bytes(16))
    simulation = make_simulation()
    for prompt in (EIGHT, OTHER, EIGHT, OTHER):
        simulation.submit(prompt, max_tokens=2)
        simulation.step(count=3)
        simulation.core.check_invariants()
    assert not simulation.jobs


def test_23_salts_separate_caches(simulation: Simulation) -> None:
    for salt, cached in (("", 0), ("tenant", 0), ("tenant", 6), ("", 6)):
        simulation.submit(EIGHT, max_tokens=1, cache_salt=salt)
        simulation.plan(0)
        assert simulation.sides[0].plans[0].admitted[0].cached_length == cached
        simulation.step()


def test_23_the_hash_depends_on_the_seed() -> None:
    digests = []
    for seed in (1, 2):
        hashed: list[prefix.HashedBlock] = []
        prefix.hash_blocks(hashed, np.array([1, 2], dtype=np.int32), "", 2, seed)
        digests.append(hashed[0].digest)
    assert digests[0] != digests[1]
