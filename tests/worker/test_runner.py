"""However a sequence is cut into rows, batched, cached, preempted or resumed, its tokens are the same (float64).

Every test samples with noise and filters beside greedy rows, so a change of logits, position or seed would show.
"""

import random

import numpy as np
import pytest

from shared.types import RowSampling, TokenMask
from tests.worker.model_folder import VOCABULARY, write_model
from tests.worker.planner import BLOCK, GREEDY, Planner, make_runner
from worker_svc.runner.runner import TorchRunner

COUNT = 20
KINDS = {
    "greedy": GREEDY,
    "sampled": RowSampling(temperature=1.3, seed=(7 << 32) + 1),
    "filtered": RowSampling(temperature=1.5, top_k=40, top_p=0.95, min_p=0.01, seed=5),
}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> TorchRunner:
    return make_runner(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def planner(runner: TorchRunner) -> Planner:
    planner = Planner(runner)
    planner.open()
    return planner


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


def alone(planner: Planner, prompt: list[int], sampling: RowSampling, count: int = COUNT) -> list[int]:
    """The undisturbed run: one sequence, its prompt in one row."""
    planner.admit(0, prompt, sampling)
    return planner.generate(0, count)


@pytest.mark.parametrize("sampling", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("chunk", [1, 7, BLOCK, 2 * BLOCK])
def test_chunked_equals_whole(planner: Planner, sampling: RowSampling, chunk: int) -> None:
    prompt = prompt_of(3 * BLOCK + 5)
    expected = alone(planner, prompt, sampling)
    planner.admit(1, prompt, sampling)
    assert planner.generate(1, COUNT, chunk) == expected


@pytest.mark.parametrize("sampling", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("length", [3 * BLOCK, 3 * BLOCK + 1, 4 * BLOCK - 1])
def test_cached_equals_cold(planner: Planner, sampling: RowSampling, length: int) -> None:
    """Also where the prompt is a whole number of blocks: at least one token is computed again."""
    prompt = prompt_of(length)
    expected = alone(planner, prompt, sampling)
    shared = planner.sequences[0].blocks[: (length - 1) // BLOCK]
    planner.admit(1, prompt, sampling, cached=shared)
    assert planner.generate(1, COUNT) == expected


def test_equal_prompts_share_blocks_in_one_step(planner: Planner) -> None:
    """The row that writes comes first; the other reads what every layer stored in the same step."""
    prompt = prompt_of(2 * BLOCK + 3)
    expected = alone(planner, prompt, KINDS["sampled"])
    planner.admit(1, prompt, KINDS["sampled"])
    first = planner.next_block
    planner.admit(2, prompt, KINDS["sampled"], cached=[first, first + 1])
    tokens = planner.step([(1, len(prompt)), (2, 3)])
    assert tokens == [expected[0]] * 2
    assert planner.sequences[1].blocks[:2] == [first, first + 1]


def test_batched_equals_alone(planner: Planner) -> None:
    """Eight sequences of all kinds join one by one, their prompts in chunks beside the others' decode rows."""
    kinds = list(KINDS.values())
    work = {slot: (prompt_of(11 + 13 * slot, seed=slot), kinds[slot % len(kinds)]) for slot in range(8)}
    expected = {slot: alone(planner, *work[slot]) for slot in work}
    planner.open()
    for slot, (prompt, sampling) in work.items():
        planner.admit(slot, prompt, sampling)
        planner.step([(other, min(9, planner.remaining(other))) for other in range(slot + 1)])
    while any(len(planner.sequences[slot].tokens) < len(work[slot][0]) + COUNT for slot in work):
        planner.step([(slot, min(9, planner.remaining(slot))) for slot in work])
    for slot, (prompt, _) in work.items():
        assert planner.sequences[slot].tokens[len(prompt) :][:COUNT] == expected[slot]


@pytest.mark.parametrize("sampling", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("done", [1, 6, COUNT - 1])
def test_replayed_equals_undisturbed(planner: Planner, sampling: RowSampling, done: int) -> None:
    """Preempted, or resumed after a crash: the output so far is replayed, in another slot of another epoch."""
    prompt = prompt_of(29)
    expected = alone(planner, prompt, sampling)
    planner.open()
    planner.admit(5, prompt, sampling, output=expected[:done])
    assert planner.generate(5, COUNT - done, chunk=10) == expected[done:]


def test_plans_ahead_of_results(planner: Planner) -> None:
    """Four plans are built before any result is read: tokens are fed back inside the worker."""
    prompt = prompt_of(21)
    expected = alone(planner, prompt, KINDS["sampled"])
    planner.open()
    planner.admit(0, prompt, KINDS["sampled"])
    plans = [planner.plan([(0, len(prompt))])[0], *(planner.plan([(0, 1)])[0] for _ in range(3))]
    assert [len(plan.token_ids) for plan in plans] == [21, 0, 0, 0]
    assert [int(planner.runner.step(plan).to_host().token_ids[0]) for plan in plans] == expected[:4]


def test_the_next_slot_comes_from_the_block_table(planner: Planner) -> None:
    """Blocks in any order, none beside another."""
    prompt = prompt_of(2 * BLOCK + 5)
    expected = alone(planner, prompt, GREEDY)
    planner.admit(1, prompt, GREEDY)
    for block in (90, 40, 77, 3, 101):
        planner.next_block = block
        count = min(BLOCK, planner.remaining(1))
        planner.step([(1, count)])
    planner.next_block = 60
    while len(planner.sequences[1].tokens) < len(prompt) + COUNT:
        planner.step([(1, 1)])
    assert planner.sequences[1].tokens[len(prompt) :][:COUNT] == expected
    assert planner.sequences[1].blocks[:3] == [90, 40, 77]


def test_a_mask_allows_only_its_tokens(planner: Planner) -> None:
    allowed = {3, 17, 299}
    bits = np.zeros(VOCABULARY, dtype=bool)
    bits[list(allowed)] = True
    mask = np.packbits(bits, bitorder="little").tobytes()
    for slot, sampling in enumerate(KINDS.values()):
        planner.admit(slot, prompt_of(5), sampling)
        assert planner.step([(slot, 5)], masks=(TokenMask(slot, mask),))[0] in allowed


def test_an_empty_mask_fails_its_row_alone(planner: Planner) -> None:
    expected = alone(planner, prompt_of(9), GREEDY, 1)
    planner.admit(1, prompt_of(9), GREEDY)
    planner.admit(2, prompt_of(9), KINDS["filtered"])
    planner.admit(3, prompt_of(9), GREEDY)
    nothing = bytes(-(-VOCABULARY // 8))
    masks = (TokenMask(1, nothing), TokenMask(2, nothing))
    assert planner.step([(1, 9), (2, 9), (3, 9)], masks=masks) == [-1, -1, *expected]


def test_nan_fails_its_row_alone_and_zeroed_blocks_are_clean(planner: Planner) -> None:
    """Poisoned K/V of one sequence; its neighbours in the padded decode batch have longer and shorter contexts."""
    prompts = [prompt_of(length, seed=length) for length in (5, 20, 70)]
    expected = [alone(planner, prompt, GREEDY, 3) for prompt in prompts]
    for slot, prompt in enumerate(prompts):
        planner.admit(slot, prompt, GREEDY)
    planner.step([(slot, len(prompt)) for slot, prompt in enumerate(prompts)])
    poisoned = planner.sequences[1].blocks
    for layer in planner.runner.cache.layers:
        layer.key[poisoned] = layer.value[poisoned] = float("nan")
    assert planner.step([(0, 1), (1, 1), (2, 1)]) == [expected[0][1], -1, expected[2][1]]
    planner.admit(1, prompts[1], GREEDY)
    planner.next_block = poisoned[0]
    assert planner.step([(1, len(prompts[1]))], zeroed=tuple(poisoned)) == [expected[1][0]]
    assert planner.step([(1, 1), (2, 1)]) == [expected[1][1], expected[2][2]]


def test_min_tokens_holds_back_what_would_end_it(planner: Planner) -> None:
    """Also when part of the output is replayed: it counts from the prompt's end."""
    prompt = prompt_of(9)
    free = alone(planner, prompt, GREEDY, 6)
    ending = RowSampling(temperature=0.0, min_tokens=4, suppressed_ids=(free[0], free[4]))
    held = alone(planner, prompt, ending, 4)
    assert not {free[0], free[4]} & set(held)
    planner.admit(0, prompt, ending, output=held[:2])
    assert planner.generate(0, 2) == held[2:]
    planner.admit(0, prompt, ending, output=free[:4])
    assert planner.generate(0, 2) == free[4:6]


def test_a_heartbeat_changes_nothing(planner: Planner) -> None:
    prompt = prompt_of(12)
    expected = alone(planner, prompt, GREEDY, 4)
    planner.admit(1, prompt, GREEDY)
    tokens = planner.step([(1, 12)])
    for _ in range(3):
        assert planner.step([]) == []
        tokens += planner.step([(1, 1)])
    assert tokens == expected
