"""Qwen3's logits and greedy tokens are those of transformers, whatever the configuration."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shared.types import StepPlan
from tandem import tiny
from tests.worker.model_folder import VOCABULARY, edit_config, reference_greedy, reference_logits, write_model
from tests.worker.planner import GREEDY, Planner, make_runner

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

CONFIGS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "wide heads, one K/V head": {"head_dim": 128, "num_key_value_heads": 1},
    "as many K/V heads": {"head_dim": 64, "num_key_value_heads": 4},
    "bias": {"attention_bias": True},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e6}},
    "yarn": {"rope_parameters": {**YARN, "rope_theta": 1e6}},
    "yarn, own factor": {"rope_parameters": {**YARN, "rope_theta": 1e4, "attention_factor": 0.8, "truncate": False}},
    "yarn, two scales": {"rope_parameters": {**YARN, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 0.5}},
    "yarn, other betas": {"rope_parameters": {**YARN, "rope_theta": 1e6, "beta_fast": 16, "beta_slow": 2}},
}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


def all_logits(folder: Path, tokens: list[int], dtype: str) -> torch.Tensor:
    """[len(tokens), vocabulary]: what the runner's sampler would be given for each token."""
    runner = make_runner(folder, dtype=dtype)
    planner = Planner(runner)
    planner.admit(0, tokens)
    plan: StepPlan = planner.plan([(0, len(tokens))])[0]
    with torch.inference_mode():
        hidden = runner.forward(runner.batch.inputs(runner.batch.fold(plan)))
        return runner.model.head.logits(hidden)[:, : runner.batch.limits.vocabulary_size]


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder, tokens = write_model(tmp_path, **changes), prompt_of(100)
    for name, tolerance in (("float64", 1e-9), ("float32", 2e-3)):
        expected = reference_logits(folder, tokens, getattr(torch, name))
        assert expected.std() > 0.5, "flat logits show nothing"
        torch.testing.assert_close(all_logits(folder, tokens, name), expected, atol=tolerance, rtol=0)


def test_logits_of_the_trained_model() -> None:
    """It knows its text by heart, so its tokens alone would not show a fault in far-away keys."""
    tokens = prompt_of(300)
    expected = reference_logits(tiny.DENSE, tokens, torch.float64)
    torch.testing.assert_close(all_logits(tiny.DENSE, tokens, "float64"), expected, atol=1e-9, rtol=0)


def test_logits_in_bfloat16(tmp_path: Path) -> None:
    """No two orders of rounding agree in bfloat16: the error against float64 is what transformers' own is."""
    folder, tokens = write_model(tmp_path), prompt_of(100)
    exact = reference_logits(folder, tokens, torch.float64)
    ours, theirs = all_logits(folder, tokens, "bfloat16"), reference_logits(folder, tokens, torch.bfloat16)
    assert (ours.double() - exact).norm() < 1.3 * (theirs.double() - exact).norm()


def test_logits_without_qk_norm(tmp_path: Path) -> None:
    folder, tokens = write_model(tmp_path, attention_bias=True), prompt_of(60)
    drop_norms(folder)
    expected = reference_logits(folder, tokens, torch.float64)
    torch.testing.assert_close(all_logits(folder, tokens, "float64"), expected, atol=1e-9, rtol=0)


def drop_norms(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = {
        name: tensor for name, tensor in load_file(path).items() if "q_norm" not in name and "k_norm" not in name
    }
    save_file(tensors, path)
    edit_config(folder, use_qk_norm=False)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_parameters": ..., "rope_theta": 1e6, "rope_scaling": {**YARN, "type": "yarn", "rope_type": ...}},
        {"rope_parameters": ..., "rope_theta": 1e6, "rope_scaling": YARN, "torch_dtype": "float32", "dtype": ...},
    ],
)
def test_older_spellings_of_the_config(tmp_path: Path, spelling: dict[str, Any]) -> None:
    folder, tokens = write_model(tmp_path, rope_parameters={**YARN, "rope_theta": 1e6}), prompt_of(80)
    expected = all_logits(folder, tokens, "float64")
    if "rope_scaling" in spelling:
        scaling = {key: value for key, value in spelling["rope_scaling"].items() if value is not ...}
        spelling = {**spelling, "rope_scaling": scaling}
    edit_config(folder, **spelling)
    torch.testing.assert_close(all_logits(folder, tokens, "float64"), expected, atol=0, rtol=0)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "attention_bias": True}])
def test_greedy_tokens(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder, prompt = write_model(tmp_path, seed=3, **changes), prompt_of(37)
    planner = Planner(make_runner(folder))
    planner.admit(0, prompt, GREEDY)
    tokens = planner.generate(0, 24)
    assert tokens == reference_greedy(folder, prompt, 24)
    assert len(set(tokens)) > 4, "a constant continuation shows nothing"


def test_float64_is_float64_throughout(tmp_path: Path) -> None:
    runner = make_runner(write_model(tmp_path))
    tensors = [*runner.model.parameters(), *runner.model.buffers(), *(layer.key for layer in runner.cache.layers)]
    assert {tensor.dtype for tensor in tensors} == {torch.float64}
    assert np.isfinite(sum(float(tensor.sum()) for tensor in tensors))
