"""Penalties, biases, allowed tokens and bad words choose what a naive computation on transformers' logits chooses.

In float64, whatever else is in the batch, with cached blocks, and where a sequence is replayed after a loss.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.errors import InvalidRequest
from shared.logit_rules import LogitRules
from shared.types import RowSampling, TokenMask
from tests.worker.model_folder import VOCABULARY, reference_logits, write_model
from tests.worker.planner import BLOCK, GREEDY, Planner, make_runner
from tests.worker.rules_oracle import adjusted
from tests.worker.test_runner import prompt_of

COUNT = 24
PROMPT = prompt_of(2 * BLOCK + 3)


def allowed(*tokens: int) -> bytes:
    bits = np.zeros(VOCABULARY, dtype=bool)
    bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little").tobytes()


def ruled(rules: LogitRules, **sampling: float) -> RowSampling:
    return RowSampling(**{"temperature": 0.0, **sampling}, rules=rules)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared_planner(folder: Path) -> Planner:
    return Planner(make_runner(folder, max_num_seqs=16))


@pytest.fixture
def planner(shared_planner: Planner) -> Planner:
    shared_planner.open()
    shared_planner.next_block = 0
    return shared_planner


@pytest.fixture(scope="module")
def rules(shared_planner: Planner) -> dict[str, LogitRules]:
    """Of each kind, made so that each one changes what is sampled."""
    shared_planner.open()
    shared_planner.admit(0, PROMPT)
    free = shared_planner.generate(0, COUNT)
    words = ((free[2],), (free[4], free[5]), (free[8], free[9], free[10]), (PROMPT[-1], free[0]))
    return {
        "presence": LogitRules(presence_penalty=1.9),
        "frequency": LogitRules(frequency_penalty=0.7),
        "negative": LogitRules(frequency_penalty=-1.5, presence_penalty=-2.0),
        "repetition": LogitRules(repetition_penalty=1.8),
        "repetition wanted": LogitRules(repetition_penalty=0.4),
        "bias": LogitRules(bias=((free[1], -100.0), (17, 4.5), (VOCABULARY - 1, 4.0))),
        "allowed": LogitRules(allowed=allowed(*range(1, VOCABULARY, 7))),
        "bad words": LogitRules(bad_words=words),
        "a bad token": LogitRules(bad_words=words[:1]),
        "all": LogitRules(allowed(*range(0, VOCABULARY, 2)), words, ((4, 3.0), (8, 3.0)), 1.3, 0.4, 0.3),
    }


def expected_tokens(folder: Path, tokens: list[int], rules: LogitRules) -> list[int]:
    """For each position of the output, what should have been chosen there."""
    logits = reference_logits(folder, tokens, torch.float64).numpy()
    output = tokens[len(PROMPT) :]
    return [
        int(adjusted(logits[len(PROMPT) + done - 1], PROMPT, output[:done], rules).argmax())
        for done in range(len(output))
    ]


def test_every_rule_chooses_as_its_definition_says(
    planner: Planner, folder: Path, rules: dict[str, LogitRules]
) -> None:
    """All in one batch, beside a sequence without rules, their prompts in chunks beside decode rows."""
    kinds = [ruled(own) for own in rules.values()]
    for slot, sampling in enumerate([*kinds, GREEDY]):
        planner.admit(slot, PROMPT, sampling)
        planner.step([(other, min(9, planner.remaining(other))) for other in range(slot + 1)])
    while len(planner.sequences[len(kinds)].tokens) < len(PROMPT) + COUNT:
        planner.step([(slot, min(9, planner.remaining(slot))) for slot in range(len(kinds) + 1)])
    free = planner.sequences[len(kinds)].tokens[len(PROMPT) :][:COUNT]
    for slot, (name, own) in enumerate(rules.items()):
        tokens = planner.sequences[slot].tokens[: len(PROMPT) + COUNT]
        assert tokens[len(PROMPT) :] == expected_tokens(folder, tokens, own), name
        assert tokens[len(PROMPT) :] != free, f"{name} has no effect"


@pytest.mark.parametrize("name", ["repetition", "bad words", "all"])
def test_cached_equals_cold(planner: Planner, rules: dict[str, LogitRules], name: str) -> None:
    """The tokens of cached blocks count too."""
    planner.admit(0, PROMPT, ruled(rules[name]))
    expected = planner.generate(0, COUNT)
    planner.admit(1, PROMPT, ruled(rules[name]), cached=planner.sequences[0].blocks[:2])
    assert planner.generate(1, COUNT) == expected


@pytest.mark.parametrize(("temperature", "done"), [(1.2, 6), (0.0, COUNT - 3)])
def test_replayed_equals_undisturbed(
    planner: Planner, rules: dict[str, LogitRules], temperature: float, done: int
) -> None:
    """Preempted, or resumed after a loss: output tokens count as output, in another slot of another epoch, with and
    without cached blocks that hold some of them."""
    for own in rules.values():
        sampling = ruled(own, temperature=temperature, seed=3)
        planner.admit(0, PROMPT, sampling)
        expected = planner.generate(0, COUNT)
        blocks = planner.sequences[0].blocks
        planner.admit(2, PROMPT, sampling, output=expected[:done], cached=blocks[: (len(PROMPT) + done - 1) // BLOCK])
        assert planner.generate(2, COUNT - done) == expected[done:]
        planner.open()
        planner.next_block = 0
        planner.admit(5, PROMPT, sampling, output=expected[:done])
        assert planner.generate(5, COUNT - done, chunk=10) == expected[done:]


def test_plans_ahead_of_results(planner: Planner, rules: dict[str, LogitRules]) -> None:
    """Tokens that the host has not seen yet count."""
    sampling = ruled(rules["all"])
    planner.admit(0, PROMPT, sampling)
    expected = planner.generate(0, 4)
    planner.open()
    planner.admit(0, PROMPT, sampling)
    plans = [planner.plan([(0, len(PROMPT))])[0], *(planner.plan([(0, 1)])[0] for _ in range(3))]
    assert [int(planner.runner.step(plan).to_host().token_ids[0]) for plan in plans] == expected


def test_a_slot_forgets_what_ran_there(planner: Planner, rules: dict[str, LogitRules]) -> None:
    kinds = [ruled(rules["all"]), ruled(rules["frequency"]), GREEDY, ruled(rules["bias"]), ruled(rules["all"])]
    outputs = []
    for slots in (range(len(kinds)), [7] * len(kinds)):
        planner.open()
        planner.next_block = 0
        outputs.append([])
        for slot, sampling in zip(slots, kinds, strict=True):
            planner.admit(slot, PROMPT, sampling)
            outputs[-1].append(planner.generate(slot, COUNT))
    assert outputs[0] == outputs[1]


def test_rules_and_a_mask_both_count(planner: Planner) -> None:
    planner.admit(0, PROMPT, ruled(LogitRules(allowed=allowed(3, 4, 5), bias=((3, 100.0),))))
    assert planner.step([(0, len(PROMPT))], masks=(TokenMask(0, allowed(4, 5, 6)),))[0] in (4, 5)


def test_a_word_that_leaves_nothing_fails_its_row_alone(planner: Planner) -> None:
    planner.admit(0, PROMPT, ruled(LogitRules(allowed=allowed(3), bad_words=((3, 3),))))
    planner.admit(1, PROMPT, ruled(LogitRules(allowed=allowed(3))))
    assert planner.step([(0, len(PROMPT)), (1, len(PROMPT))]) == [3, 3]
    assert planner.step([(0, 1), (1, 1)]) == [-1, 3]


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        (LogitRules(allowed=b"\1"), "allowed"),
        (LogitRules(bad_words=((1, VOCABULARY),)), "bad_words"),
        (LogitRules(bad_words=((),)), "bad_words"),
        (LogitRules(bias=((-1, 1.0),)), "bias"),
        (LogitRules(bias=((1, float("nan")),)), "bias"),
        (LogitRules(repetition_penalty=0.0), "rules"),
        (LogitRules(presence_penalty=float("inf")), "rules"),
    ],
)
def test_a_plan_with_impossible_rules_is_refused(planner: Planner, rules: LogitRules, named: str) -> None:
    planner.admit(0, PROMPT, replace(GREEDY, rules=rules))
    with pytest.raises(InvalidRequest, match=named):
        planner.step([(0, 3)])
    planner.open()
