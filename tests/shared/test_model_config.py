"""A model folder's JSON is read in every spelling that is in use, and refused by name where it can't be served."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import StartupError
from shared.model_config import load_model_config

BASE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rope_theta": 1e6,
}


MOE: dict[str, Any] = {
    **BASE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}


def folder(tmp_path: Path, config: dict[str, Any], **files: dict[str, Any]) -> Path:
    """A folder with these files; `...` in the config leaves a key out."""
    given = {key: value for key, value in config.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(given))
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


@pytest.mark.parametrize(
    ("given", "kind", "theta", "factor"),
    [
        ({}, "default", 1e6, 1.0),
        ({"rope_scaling": None}, "default", 1e6, 1.0),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear", 1e6, 2.0),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn", 1e6, 4.0),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "default", 5e5, 1.0),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 2.0}}, "yarn", 5e5, 2.0),
    ],
)
def test_both_spellings_of_rope(tmp_path: Path, given: dict[str, Any], kind: str, theta: float, factor: float) -> None:
    rope = load_model_config(folder(tmp_path, {**BASE, **given})).rope
    assert (rope.kind, rope.theta, rope.factor) == (kind, theta, factor)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": None}, "none"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"vocab_size": 100.5}, "vocab_size"),
        ({"rope_theta": "large"}, "large"),
        ({"eos_token_id": "<|end|>"}, "eos_token_id"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, given: dict[str, Any], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        load_model_config(folder(tmp_path, {**BASE, **given}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -5),
        ("temperature", "hot"),
        ("temperature", 101),
        ("top_k", 1.5),
        ("top_k", -1),
        ("top_p", 0),
        ("top_p", 7),
        ("min_p", -0.1),
        ("min_p", float("nan")),
        ("eos_token_id", "x"),
        ("eos_token_id", [3, "x"]),
    ],
)
def test_a_generation_config_that_no_request_could_have_is_named(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(StartupError, match=key):
        load_model_config(folder(tmp_path, {**BASE, "eos_token_id": 3}, generation_config={key: value}))


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=str(tmp_path)):
        load_model_config(tmp_path)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(StartupError, match=r"config\.json"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("spelling", ["dtype", "torch_dtype"])
def test_both_spellings_of_dtype(tmp_path: Path, spelling: str) -> None:
    assert load_model_config(folder(tmp_path, {**BASE, spelling: "bfloat16"})).dtype == "bfloat16"


def test_end_of_sequence_is_the_union_of_all_three_files(tmp_path: Path) -> None:
    """A list in generation_config, one in config, another in the tokenizer (vllm#4182)."""
    made = folder(
        tmp_path,
        {**BASE, "eos_token_id": 3},
        generation_config={"eos_token_id": [7, 5]},
        tokenizer_config={"eos_token": "<|end|>"},
        tokenizer={"added_tokens": [{"id": 9, "content": "<|end|>"}]},
    )
    assert load_model_config(made).eos_token_ids == (3, 5, 7, 9)


def test_sampling_defaults_come_from_generation_config(tmp_path: Path) -> None:
    generation = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    defaults = load_model_config(folder(tmp_path, BASE, generation_config=generation)).sampling_defaults
    assert (defaults.temperature, defaults.top_k, defaults.top_p, defaults.min_p) == (0.6, 20, 0.95, 0.0)
    assert defaults.repetition_penalty == 1.05


@pytest.mark.parametrize("spelling", ["num_experts", "num_local_experts"])
def test_experts_in_both_spellings(tmp_path: Path, spelling: str) -> None:
    moe = load_model_config(folder(tmp_path, {**MOE, "num_experts": ..., spelling: 16})).moe
    assert moe is not None
    assert (moe.num_experts, moe.experts_per_token, moe.intermediate_size, moe.norm_topk_prob) == (16, 2, 40, True)


@pytest.mark.parametrize(
    ("given", "sparse"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"decoder_sparse_step": 2}, [1, 3, 5]),
        ({"mlp_only_layers": [0, 3]}, [1, 2, 4, 5]),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [5]}, [2]),
    ],
)
def test_which_layers_have_experts(tmp_path: Path, given: dict[str, Any], sparse: list[int]) -> None:
    moe = load_model_config(folder(tmp_path, {**MOE, **given})).moe
    assert moe is not None
    assert [layer for layer in range(6) if moe.is_sparse(layer)] == sparse


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"num_experts": ...}, "'num_experts' is missing"),
        ({"num_experts": 0}, "num_experts 0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
        ({"num_experts_per_tok": ...}, "num_experts_per_tok"),
        ({"moe_intermediate_size": 40.5}, "moe_intermediate_size"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ({"mlp_only_layers": [6]}, "mlp_only_layers"),
        ({"mlp_only_layers": 1}, "mlp_only_layers"),
    ],
)
def test_experts_that_cannot_be_served_are_named(tmp_path: Path, given: dict[str, Any], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        load_model_config(folder(tmp_path, {**MOE, **given}))


def test_a_dense_model_has_no_experts(tmp_path: Path) -> None:
    assert load_model_config(folder(tmp_path, BASE)).moe is None


def test_the_fingerprint_follows_the_content_not_the_layout(tmp_path: Path) -> None:
    one = load_model_config(folder(tmp_path, BASE)).fingerprint
    (tmp_path / "config.json").write_text(json.dumps(dict(reversed(BASE.items())), indent=4))
    assert load_model_config(tmp_path).fingerprint == one
    assert load_model_config(folder(tmp_path, {**BASE, "vocab_size": 101})).fingerprint != one
