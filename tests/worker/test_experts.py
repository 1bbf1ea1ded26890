"""Qwen3-MoE's logits and greedy tokens are those of transformers; experts load from both layouts, each slice once."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.errors import StartupError
from tandem import tiny
from tests.worker.model_folder import reference_greedy, reference_logits, write_moe_model
from tests.worker.planner import GREEDY, Planner, make_runner
from tests.worker.test_loading import assert_same, save, state, tensors_of
from tests.worker.test_model import all_logits, prompt_of
from worker_svc.layers.ops import ExpertWeights, Norm, Routing
from worker_svc.layers.torch_ops import TorchOps

CONFIGS: dict[str, dict[str, Any]] = {
    "probabilities as they are": {"norm_topk_prob": False},
    "probabilities scaled to one": {"norm_topk_prob": True},
    "every second layer": {"decoder_sparse_step": 2, "num_hidden_layers": 4},
    "two dense layers": {"mlp_only_layers": [0, 2], "num_hidden_layers": 3, "norm_topk_prob": True},
    "one expert a token": {"num_experts_per_tok": 1},
    "all experts, untied": {"num_experts_per_tok": 6, "tie_word_embeddings": False},
}
DOWN = "model.layers.1.mlp.experts.4.down_proj.weight"
FUSED = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder, tokens = write_moe_model(tmp_path, **changes), prompt_of(100)
    for name, tolerance in (("float64", 1e-9), ("float32", 2e-3)):
        expected = reference_logits(folder, tokens, getattr(torch, name))
        assert expected.std() > 0.5, "flat logits show nothing"
        torch.testing.assert_close(all_logits(folder, tokens, name), expected, atol=tolerance, rtol=0)


def test_logits_of_the_trained_model() -> None:
    tokens = prompt_of(300)
    expected = reference_logits(tiny.MOE, tokens, torch.float64)
    torch.testing.assert_close(all_logits(tiny.MOE, tokens, "float64"), expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_greedy_tokens(tmp_path: Path, norm_topk_prob: bool) -> None:
    folder, prompt = write_moe_model(tmp_path, seed=3, norm_topk_prob=norm_topk_prob), prompt_of(37)
    planner = Planner(make_runner(folder))
    planner.admit(0, prompt, GREEDY)
    tokens = planner.generate(0, 24)
    assert tokens == reference_greedy(folder, prompt, 24)
    assert len(set(tokens)) > 4, "a constant continuation shows nothing"


def test_both_layouts_of_experts_load_to_the_same(tmp_path: Path) -> None:
    one_by_one, fused = (write_moe_model(tmp_path / name, fused=name == "fused") for name in ("single", "fused"))
    assert DOWN in tensors_of(one_by_one) and FUSED in tensors_of(fused)
    assert_same(state(one_by_one), state(fused))


def test_packed_experts_hold_their_parts_in_order(tmp_path: Path) -> None:
    folder = write_moe_model(tmp_path)
    tensors, loaded = tensors_of(folder), state(folder)
    prefix = "model.layers.1.mlp.experts"
    for expert in range(6):
        gate, up, down = (tensors[f"{prefix}.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        assert torch.equal(loaded[f"{prefix}.gate_up_proj"][expert], torch.cat((gate, up)).double())
        assert torch.equal(loaded[f"{prefix}.down_proj"][expert], down.double())


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = write_moe_model(tmp_path)
    save(folder, {name: tensor for name, tensor in tensors_of(folder).items() if name != DOWN})
    with pytest.raises(StartupError, match=f"{DOWN} is missing"):
        state(folder)


@pytest.mark.parametrize(
    ("fused", "extra"),
    [
        (False, "model.layers.1.mlp.experts.6.up_proj.weight"),
        (False, "model.layers.1.mlp.up_proj.weight"),
        (True, DOWN),
    ],
)
def test_experts_that_the_config_does_not_know(tmp_path: Path, fused: bool, extra: str) -> None:
    """One too many, a dense layer beside experts, both layouts at once: which of them would count?"""
    folder = write_moe_model(tmp_path, fused=fused)
    save(folder, {**tensors_of(folder), extra: torch.zeros(1)})
    with pytest.raises(StartupError, match=extra):
        state(folder)


def test_fused_experts_lying_the_other_way_are_refused(tmp_path: Path) -> None:
    """Other families store [experts, inputs, outputs]."""
    folder = write_moe_model(tmp_path, fused=True)
    tensors = tensors_of(folder)
    save(folder, {**tensors, FUSED: tensors[FUSED].transpose(1, 2)})
    with pytest.raises(StartupError, match=re.escape(f"{FUSED} has shape [6, 64, 80], the model needs [6, 80, 64]")):
        state(folder)


def test_dummy_experts_differ(tmp_path: Path) -> None:
    folder = write_moe_model(tmp_path)
    (folder / "model.safetensors").unlink()
    weights = make_runner(folder, load_format="dummy").model.state_dict()
    for name in ("gate_up_proj", "down_proj"):
        experts = weights[f"model.layers.0.mlp.experts.{name}"].flatten(1)
        assert len({tuple(expert[:8].tolist()) for expert in experts}) == 6
        assert 0.01 < float(experts.std()) < 0.03


def test_padding_is_sent_to_no_expert() -> None:
    """Not even where it holds NaN, and the other tokens are what they are without it."""
    x, slots = torch.randn(5, 16, dtype=torch.float64), torch.tensor([3, -1, 0, -1, 7])
    norm = Norm(torch.ones(16, dtype=torch.float64), 1e-6)
    routing = Routing(torch.randn(4, 16, dtype=torch.float64), 2, renormalize=True)
    experts = ExpertWeights(*(torch.randn(4, *size, dtype=torch.float64) for size in ((12, 16), (16, 6))), first=0)
    real = slots >= 0
    expected = TorchOps().norm_experts_add(x[real], norm, routing, experts, slots[real], None)
    x[1] = torch.nan
    total = TorchOps().norm_experts_add(x, norm, routing, experts, slots, None)
    torch.testing.assert_close(total[real], expected)
    assert not total[~real].any()
