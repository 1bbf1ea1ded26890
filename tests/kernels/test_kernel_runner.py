"""The kernel runner gives the tokens that the torch runner gives, here on a CPU in Triton's interpreter, uncaptured;
tests/gpu compares them where kernels are compiled."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.logit_rules import LogitRules
from shared.model_config import load_model_config
from shared.types import RowSampling, TokenMask
from tests.kernels import COMPILED
from tests.worker.model_folder import VOCABULARY, write_model, write_moe_model
from tests.worker.planner import BLOCK, GREEDY, Planner
from worker_svc.config import WorkerConfig
from worker_svc.layers.triton_ops import TritonOps
from worker_svc.loading import load_weights
from worker_svc.parallel import TensorParallel
from worker_svc.runner.build import build_runner, empty_model
from worker_svc.runner.build_kernels import RunnerParts
from worker_svc.runner.kernel_runner import KernelRunner
from worker_svc.runner.step_kernels import GpuAttention

pytestmark = pytest.mark.skipif(COMPILED, reason="runs on a CPU in the interpreter")

KINDS = {
    "greedy": GREEDY,
    "sampled": RowSampling(temperature=1.3, seed=(7 << 32) + 1),
    "narrow": RowSampling(temperature=1.5, top_k=40, top_p=0.95, min_p=0.01, seed=5),
    "filtered": RowSampling(temperature=1.2, top_p=0.9, seed=6),
    "ending": RowSampling(temperature=1.0, seed=8, min_tokens=3, suppressed_ids=(3, 17, 200)),
}


@pytest.fixture(
    scope="module", params=[write_model, partial(write_moe_model, num_hidden_layers=1)], ids=["dense", "experts"]
)
def planners(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Planner, Planner]]:
    """The same plans for the torch runner and for the kernel runner, in float32.

    A few programs have to fill this machine: those without work cost the interpreter as much as the others.
    """
    folder = request.param(tmp_path_factory.mktemp("model"))
    config = WorkerConfig(
        str(folder), dtype="float32", block_size=BLOCK, num_kv_blocks=64, max_num_seqs=6, max_num_batched_tokens=96
    )
    reference = Planner(build_runner(config, load_model_config(folder), TensorParallel()))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("worker_svc.kernels.parts._FILLING", 12)
        yield reference, Planner(_kernel_runner(config))


def _kernel_runner(config: WorkerConfig) -> KernelRunner:
    model_config, group = load_model_config(Path(config.model)), TensorParallel()
    model = empty_model(config, model_config, torch.float32, group, TritonOps(pdl=False), torch.device("cpu"))
    load_weights(model, config.folder, report=False)
    attention = GpuAttention(flash=None, own_decode=True, pdl=False)
    parts = RunnerParts(config, model_config, model, group, attention, 64, torch.device("cpu"))
    return parts.runner()


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def test_sequences_of_all_kinds_join_one_by_one(planners: tuple[Planner, Planner]) -> None:
    """Prompts in chunks beside decode rows, then decode rows alone; slots are taken again in a second epoch."""
    for epoch in range(2):
        outputs = []
        for planner in planners:
            planner.open()
            planner.next_block = 0
            for slot, sampling in enumerate(KINDS.values()):
                planner.admit(slot, prompt_of(11 + 7 * slot, epoch + slot), sampling)
                planner.step([(other, min(9, planner.remaining(other))) for other in range(slot + 1)])
            for _ in range(6):
                planner.step([(slot, min(9, planner.remaining(slot))) for slot in range(len(KINDS))])
            outputs.append([planner.sequences[slot].tokens for slot in range(len(KINDS))])
        assert outputs[0] == outputs[1]
        assert all(len(tokens) > 12 + 7 * slot for slot, tokens in enumerate(outputs[0]))


def test_plans_ahead_of_results(planners: tuple[Planner, Planner]) -> None:
    """Tokens are fed back on the device while their results are still to be read."""
    reference, planner = planners
    prompt = prompt_of(21, 3)
    for one in planners:
        one.open()
        one.next_block = 0
        one.admit(0, prompt, KINDS["sampled"])
    expected = reference.generate(0, 4)
    plans = [planner.plan([(0, 21)])[0], *(planner.plan([(0, 1)])[0] for _ in range(3))]
    pending = [planner.runner.step(plan) for plan in plans]
    assert [int(tokens.to_host()[0][0]) for tokens in pending] == expected


def test_masks_and_rows_that_fail(planners: tuple[Planner, Planner]) -> None:
    bits = np.zeros(VOCABULARY, dtype=bool)
    bits[[3, 17, 299]] = True
    allowed, nothing = np.packbits(bits, bitorder="little").tobytes(), bytes(-(-VOCABULARY // 8))
    results = []
    for planner in planners:
        planner.open()
        planner.next_block = 0
        for slot in range(3):
            planner.admit(slot, prompt_of(5, slot), KINDS["sampled"])
        masks = (TokenMask(0, allowed), TokenMask(1, nothing))
        results.append(planner.step([(0, 5), (1, 5), (2, 5)], masks=masks))
        results[-1] += planner.step([(0, 1), (2, 1)])
    assert results[0] == results[1]
    assert results[0][0] in (3, 17, 299) and results[0][1] == -1


@pytest.mark.parametrize("kinds", [("sampled", "narrow"), ("greedy", "filtered"), ("ending", "sampled")], ids="+".join)
def test_the_same_rows_again_and_again(planners: tuple[Planner, Planner], kinds: tuple[str, ...]) -> None:
    """Blocks come to their tables meanwhile, and once a mask for one step."""
    bits = np.ones(VOCABULARY, dtype=bool)
    bits[::2] = False
    odd = np.packbits(bits, bitorder="little").tobytes()
    results = []
    for planner in planners:
        planner.open()
        planner.next_block = 0
        for slot, kind in enumerate(kinds):
            planner.admit(slot, prompt_of(12 + slot, slot), KINDS[kind])
        tokens = planner.step([(0, 12), (1, 13)])
        for step in range(7):
            masks = (TokenMask(1, odd),) if step == 5 else ()
            tokens += planner.step([(0, 1), (1, 1)], masks=masks)
        results.append(tokens)
    assert results[0] == results[1]
    assert results[0][2 * 6 + 1] % 2 == 1, "the mask counts"


def test_rules_and_logprobs(planners: tuple[Planner, Planner]) -> None:
    """Rows of all kinds in one batch, prompts in chunks; a second sequence of rules takes a slot meanwhile."""
    rules = LogitRules(bytes([0x7F] * 38), ((3, 4), (9,)), ((5, 1.0),), 1.3, 0.4, 0.2)
    kinds = [
        RowSampling(temperature=0.9, seed=2, rules=rules, logprobs=2),
        RowSampling(temperature=1.1, seed=3, logprobs=4),
        RowSampling(temperature=0.0, rules=LogitRules(frequency_penalty=1.5), prompt_logprobs=2),
        KINDS["narrow"],
    ]
    results = []
    for planner in planners:
        planner.open()
        planner.next_block = 0
        planner.logprobs.clear()
        planner.prompt_logprobs.clear()
        for slot, sampling in enumerate(kinds):
            planner.admit(slot, prompt_of(14 + slot, slot), sampling)
        tokens = []
        for step in range(8):
            if step == 5:
                planner.admit(0, prompt_of(7, 50), kinds[2])
            tokens += planner.step([(slot, min(6, planner.remaining(slot))) for slot in range(len(kinds))])
        words = np.frombuffer(b"".join(planner.logprobs + planner.prompt_logprobs), dtype=np.int32)
        results.append((tokens, words))
    assert results[0][0] == results[1][0]
    whole = np.abs(results[0][1]) < 1 << 20  # tokens and ranks: as bits of a float they would be next to 0
    assert len(results[0][1]) == len(results[1][1]) > 100
    assert (results[0][1][whole] == results[1][1][whole]).all()
    np.testing.assert_allclose(*(words[~whole].view(np.float32) for _, words in results), rtol=1e-3, atol=1e-4)


def test_a_heartbeat_changes_nothing(planners: tuple[Planner, Planner]) -> None:
    results = []
    for planner in planners:
        planner.open()
        planner.next_block = 0
        planner.admit(2, prompt_of(12, 9), KINDS["narrow"])
        tokens = planner.step([])
        for _ in range(3):
            tokens += planner.step([(2, planner.remaining(2))])
            assert planner.step([]) == []
        results.append(tokens)
    assert results[0] == results[1]


def test_after_a_step_that_failed(planners: tuple[Planner, Planner], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its epoch is lost, and the next one gets each step's own tokens."""
    reference, planner = planners

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    for one in planners:
        one.open()
        one.next_block = 0
        one.admit(0, prompt_of(9, 1), KINDS["sampled"])
    with monkeypatch.context() as patched:
        patched.setattr(planner.runner._programs, "sample", fail)
        with pytest.raises(RuntimeError, match="memory"):
            planner.step([(0, 9)])
    planner.open()
    planner.next_block = 0
    planner.admit(0, prompt_of(9, 1), KINDS["sampled"])
    assert planner.generate(0, 12) == reference.generate(0, 12)


def test_changes_without_rows(planners: tuple[Planner, Planner]) -> None:
    """Slots taken twice before anything runs there: the last sequence counts."""
    results = []
    for planner in planners:
        planner.open()
        planner.next_block = 0
        for seed in range(3):
            planner.admit(0, prompt_of(14, seed), KINDS["sampled"])
            assert planner.step([]) == []
        results.append(planner.generate(0, 3))
    assert results[0] == results[1]


@pytest.mark.parametrize(("rows", "padding"), [(1, 0), (2, 4), (6, 0)])
def test_padding_is_counted(planners: tuple[Planner, Planner], rows: int, padding: int) -> None:
    """With six slots decode steps have one row or six; a mixed step is not padded where it is not captured."""
    _, planner = planners
    planner.open()
    planner.next_block = 0
    for slot in range(rows):
        planner.admit(slot, prompt_of(5, slot), GREEDY)
    before = planner.runner.padding
    planner.step([(slot, 5) for slot in range(rows)])
    assert planner.runner.padding == before
    for steps in (1, 2):
        planner.step([(slot, 1) for slot in range(rows)])
        assert planner.runner.padding == before + steps * padding
