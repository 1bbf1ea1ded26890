"""Logprobs are those of transformers' logits before anything changes them, of every token once, in float64."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.errors import InvalidRequest
from shared.logit_rules import LogitRules
from shared.logprobs import TokenEntry, entry_bytes, read_entry
from shared.types import RowSampling
from tests.worker.model_folder import reference_logits, write_model
from tests.worker.planner import BLOCK, GREEDY, Planner, make_runner
from tests.worker.rules_oracle import assert_near, entry_of
from tests.worker.test_runner import prompt_of

PROMPT = prompt_of(2 * BLOCK + 9)
COUNT = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared_planner(folder: Path) -> Planner:
    return Planner(make_runner(folder))


@pytest.fixture
def planner(shared_planner: Planner) -> Planner:
    shared_planner.open()
    shared_planner.next_block = 0
    shared_planner.logprobs.clear()
    shared_planner.prompt_logprobs.clear()
    return shared_planner


def entries(data: bytes, num_top: int) -> list[TokenEntry]:
    size = entry_bytes(num_top)
    assert len(data) % size == 0
    return [read_entry(data[start : start + size]) for start in range(0, len(data), size)]


def check(folder: Path, tokens: list[int], begin: int, told: list[TokenEntry], num_top: int) -> None:
    """`told` is of the tokens from position `begin` on."""
    logits = reference_logits(folder, tokens, torch.float64).numpy()
    for position, entry in enumerate(told, begin):
        assert_near(entry, entry_of(logits[position - 1], tokens[position], num_top))


def test_logprobs_of_sampled_tokens(planner: Planner, folder: Path) -> None:
    """Of sequences with any number of likely tokens, beside one that asked for none; whatever changes the logits."""
    kinds = {
        0: replace(GREEDY, logprobs=0),
        1: GREEDY,
        2: RowSampling(temperature=1.7, seed=4, logprobs=5),
        3: RowSampling(temperature=0.7, top_k=3, seed=4, logprobs=20),
        4: RowSampling(temperature=1.2, seed=9, logprobs=2, rules=LogitRules(frequency_penalty=1.0, bias=((7, 5.0),))),
    }
    for slot, sampling in kinds.items():
        planner.admit(slot, PROMPT, sampling)
    rows = [(slot, len(PROMPT)) for slot in kinds]
    told: dict[int, bytes] = dict.fromkeys(kinds, b"")
    for _ in range(COUNT):
        planner.step(rows)
        rows, data = [(slot, 1) for slot in kinds], planner.logprobs[-1]
        for slot, sampling in kinds.items():
            size = entry_bytes(sampling.logprobs)
            told[slot], data = told[slot] + data[:size], data[size:]
        assert not data
    for slot, sampling in kinds.items():
        if sampling.logprobs is not None:
            own = entries(told[slot], sampling.logprobs)
            assert len(own) == COUNT
            check(folder, planner.sequences[slot].tokens, len(PROMPT), own, sampling.logprobs)


@pytest.mark.parametrize("chunk", [1, 7, BLOCK, 100])
def test_prompt_logprobs_chunk_by_chunk(planner: Planner, folder: Path, chunk: int) -> None:
    """Beside another one's decode rows, and prompts that nobody asked about."""
    planner.admit(3, prompt_of(5, seed=8), GREEDY)
    planner.step([(3, 5)])
    planner.admit(0, PROMPT, replace(GREEDY, prompt_logprobs=3))
    planner.admit(1, PROMPT, GREEDY)
    while planner.sequences[0].computed < len(PROMPT):
        planner.step([(3, 1), *((slot, min(chunk, planner.remaining(slot))) for slot in (1, 0))])
    told = entries(b"".join(planner.prompt_logprobs), 3)
    assert len(told) == len(PROMPT) - 1
    check(folder, PROMPT, 1, told, 3)
    planner.step([(0, 1)])
    assert not planner.prompt_logprobs[-1]


@pytest.mark.parametrize("begin", [BLOCK + 1, 2 * BLOCK, len(PROMPT) - 1])
@pytest.mark.parametrize("chunk", [3, 50])
def test_prompt_logprobs_go_on_where_they_were_lost(planner: Planner, folder: Path, begin: int, chunk: int) -> None:
    """Replayed with its first output; what the cache holds before the first one asked for is not computed again."""
    planner.admit(0, PROMPT, GREEDY)
    output = planner.generate(0, 3)
    sampling = replace(GREEDY, prompt_logprobs=0)
    for slot, cached in ((1, []), (2, planner.sequences[0].blocks[: (begin - 1) // BLOCK])):
        planner.prompt_logprobs.clear()
        planner.admit(slot, PROMPT, sampling, output=output, cached=cached, prompt_logprobs_from=begin)
        planner.generate(slot, 1, chunk)
        told = entries(b"".join(planner.prompt_logprobs), 0)
        assert len(told) == len(PROMPT) - begin
        check(folder, PROMPT, begin, told, 0)


def test_a_prompt_of_one_token_has_none(planner: Planner) -> None:
    planner.admit(0, [7], replace(GREEDY, prompt_logprobs=1, logprobs=1))
    planner.step([(0, 1)])
    assert planner.prompt_logprobs == [b""] and len(planner.logprobs[0]) == entry_bytes(1)


def test_a_first_logprob_that_no_row_computes_is_refused(planner: Planner) -> None:
    planner.admit(0, PROMPT, GREEDY)
    planner.generate(0, 1)
    sampling = replace(GREEDY, prompt_logprobs=1)
    planner.admit(1, PROMPT, sampling, cached=planner.sequences[0].blocks[:1], prompt_logprobs_from=BLOCK)
    with pytest.raises(InvalidRequest, match="prompt_logprobs_from"):
        planner.step([(1, 1)])
    planner.open()


def test_a_row_without_finite_logits_still_takes_its_place(planner: Planner) -> None:
    """Otherwise the entries of those after it would be taken for others'."""
    for slot in (0, 1):
        planner.admit(slot, PROMPT, replace(GREEDY, logprobs=2))
    planner.step([(slot, len(PROMPT)) for slot in (0, 1)])
    for layer in planner.runner.cache.layers:
        layer.key[planner.sequences[0].blocks] = float("nan")
    planner.step([(0, 1), (1, 1)])
    assert len(planner.logprobs[-1]) == 2 * entry_bytes(2)
    assert np.isfinite(entries(planner.logprobs[-1], 2)[1].logprob)
    for layer in planner.runner.cache.layers:
        layer.key.zero_()
