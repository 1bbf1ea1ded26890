"""The worker on a real GPU: transformers' tokens and logits, sampling's distribution, graphs equal to eager steps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from bench.work import SHAPES
from shared.logit_rules import LogitRules
from shared.model_config import load_model_config
from shared.types import RowSampling
from tandem.tiny import DENSE
from tests.worker.model_folder import VOCABULARY, reference_logits, write_model
from tests.worker.planner import BLOCK, GREEDY, Planner
from worker_svc.config import WorkerConfig
from worker_svc.parallel import TensorParallel
from worker_svc.runner.build import build_runner
from worker_svc.runner.kernel_runner import KernelRunner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SAMPLED = RowSampling(temperature=1.3, seed=(7 << 32) + 1)
KINDS = (GREEDY, SAMPLED, RowSampling(temperature=1.5, top_k=40, top_p=0.95, seed=5))


def make_planner(folder: Path, **settings: Any) -> Planner:
    values = {
        "dtype": "float32",
        "block_size": BLOCK,
        "num_kv_blocks": 512,
        "max_num_seqs": 20,
        "max_num_batched_tokens": 256,
        "max_model_len": 512,
        "device": "cuda",
        **settings,
    }
    runner = build_runner(
        WorkerConfig(str(folder), **values), load_model_config(folder), TensorParallel(), torch.device("cuda", 0)
    )
    planner = Planner(runner)
    planner.open()
    return planner


def prompt_of(length: int, seed: int = 0, vocabulary: int = VOCABULARY) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocabulary, length).tolist()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("small"), head_dim=64)


def test_greedy_tokens_of_the_tiny_model_are_transformers() -> None:
    planner = make_planner(DENSE)
    prompt = prompt_of(90, vocabulary=1500)
    planner.admit(0, prompt)
    tokens = planner.generate(0, 48, chunk=40)
    model = Qwen3ForCausalLM.from_pretrained(DENSE, dtype=torch.float32).cuda()
    expected = model.generate(torch.tensor([prompt]).cuda(), max_new_tokens=48, do_sample=False, eos_token_id=None)
    assert tokens == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("attention", ["auto", "fa3", "triton"])
def test_logits_of_a_06b_model_are_within_the_noise_of_bfloat16(tmp_path: Path, attention: str) -> None:
    """Both compute in bfloat16, so each is compared with float32: ours may not be much further away."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPES["qwen3-0.6b"])).bfloat16()
        model.model.rotary_emb = Qwen3RotaryEmbedding(model.config)  # its frequencies were rounded, too
    model.save_pretrained(tmp_path)
    prompt = prompt_of(200, vocabulary=150_000)
    with torch.inference_mode():
        ids = torch.tensor([prompt]).cuda()
        theirs = model(ids).logits[0, 191:199].float()
        exact = model.float()(ids).logits[0, 191:199]
    del model
    planner = make_planner(tmp_path, dtype="bfloat16", attention=attention)
    assert isinstance(planner.runner, KernelRunner)
    ours = []
    planner.admit(0, prompt[:192])
    for position in range(191, 199):  # one mixed step, then decode steps that are fed what the prompt says
        planner.runner._state.slots.last_tokens[0] = prompt[position]
        plan, _ = planner.plan([(0, planner.remaining(0))])
        planner.runner.step(plan).to_host()
        ours.append(planner.runner._kernels.logits[0].float().clone())
    error, their_error = (float((logits - exact).norm() / exact.norm()) for logits in (torch.stack(ours), theirs))
    print(f"relative error {error:.4f}, of transformers {their_error:.4f}")
    assert error < 1.3 * their_error


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_give_what_eager_steps_give(small: Path, dtype: str) -> None:
    """Sequences of all kinds, prompts in chunks beside decode rows."""
    outputs = []
    for eager in (False, True):
        planner = make_planner(small, dtype=dtype, enforce_eager=eager)
        for slot in range(12):
            planner.admit(slot, prompt_of(11 + 7 * slot, slot), KINDS[slot % 3])
            planner.step([(other, min(9, planner.remaining(other))) for other in range(slot + 1)])
        for _ in range(24):
            planner.step([(slot, min(9, planner.remaining(slot))) for slot in range(12)])
        outputs.append([planner.sequences[slot].tokens for slot in range(12)])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("sampling", KINDS)
def test_chunked_equals_whole_and_plans_ahead(small: Path, sampling: RowSampling) -> None:
    planner = make_planner(small)
    prompt = prompt_of(75)
    planner.admit(0, prompt, sampling)
    expected = planner.generate(0, 20)
    planner.admit(1, prompt, sampling)
    assert planner.generate(1, 20, chunk=7) == expected
    planner.admit(2, prompt, sampling)
    plans = [planner.plan([(2, 75)])[0], *(planner.plan([(2, 1)])[0] for _ in range(3))]
    pending = [planner.runner.step(plan) for plan in plans]
    assert [int(tokens.to_host()[0][0]) for tokens in pending] == expected[:4]


def test_rules_and_logprobs_are_those_of_the_reference(small: Path) -> None:
    """In float32 beside kernels' rows; plans of a sequence with rules run ahead of what it samples."""
    rules = LogitRules(bad_words=((3, 4), (9,)), bias=((5, 1.0),), repetition_penalty=1.3, frequency_penalty=0.4)
    kinds = (
        RowSampling(temperature=0.0, rules=rules, logprobs=2),
        RowSampling(temperature=0.0, logprobs=4, prompt_logprobs=2),
        KINDS[2],
    )
    results = []
    for attention in ("auto", "torch"):
        planner = make_planner(small, attention=attention)
        for slot, sampling in enumerate(kinds):
            planner.admit(slot, prompt_of(60 + slot, slot), sampling)
        for _ in range(3):
            planner.step([(slot, min(25, planner.remaining(slot))) for slot in range(3)])
        plans = [planner.plan([(slot, 1) for slot in range(3)])[0] for _ in range(4)]
        outcome = [pending.to_host() for pending in [planner.runner.step(plan) for plan in plans]]
        told = planner.logprobs + planner.prompt_logprobs + [one.logprobs for one in outcome]
        tokens = [planner.sequences[slot].tokens for slot in range(3)], [one.token_ids.tolist() for one in outcome]
        results.append((tokens, np.frombuffer(b"".join(told), dtype=np.int32)))
    assert results[0][0] == results[1][0]
    whole = np.abs(results[0][1]) < 1 << 20
    assert (results[0][1][whole] == results[1][1][whole]).all()
    np.testing.assert_allclose(*(words[~whole].view(np.float32) for _, words in results), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("top_k", [0, 8])
def test_the_distribution_of_samples(small: Path, top_k: int) -> None:
    """4,000 seeds at one position: chi-square against float64 probabilities, in deviations from its mean."""
    prompt, count = prompt_of(9), 4000
    p = (reference_logits(small, prompt, torch.float64)[-1] / 4.0).softmax(-1).numpy()
    if top_k:
        p = np.where(p >= np.sort(p)[-top_k], p, 0)
        p /= p.sum()
    planner = make_planner(small)
    tokens: list[int] = []
    while len(tokens) < count:
        for slot in range(20):
            planner.admit(slot, prompt, RowSampling(temperature=4.0, top_k=top_k, seed=len(tokens) + slot))
        planner.next_block = 0
        tokens += planner.step([(slot, len(prompt)) for slot in range(20)])
    order = np.argsort(-p)
    bins = np.array_split(order[p[order] > 0], min(16, int((p > 0).sum())))
    counts = np.bincount(tokens, minlength=len(p))
    expected = np.array([p[part].sum() for part in bins]) * count
    seen = np.array([counts[part].sum() for part in bins])
    assert seen.sum() == count
    excess = (((seen - expected) ** 2 / expected).sum() - len(bins) + 1) / (2 * (len(bins) - 1)) ** 0.5
    assert abs(excess) < 5
