"""Random Qwen3 models in folders, and transformers' answer to them."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

VOCABULARY = 300

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}

MOE: dict[str, Any] = {**SMALL, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


def write_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Saves a random model as transformers does; weights are large enough that attention and logits are not flat."""
    return _save(Qwen3ForCausalLM(Qwen3Config(**{**SMALL, **changes})), folder, seed)


def write_moe_model(folder: Path, seed: int = 0, *, fused: bool = False, **changes: Any) -> Path:
    """The same with experts; `fused` stores those of a layer as two tensors, in place of three for each."""
    return _save(Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**MOE, **changes})), folder, seed, fused)


def _save(model: PreTrainedModel, folder: Path, seed: int, fused: bool = False) -> Path:
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder, save_original_format=not fused)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Changes keys of config.json; `...` takes a key out."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def reference_logits(folder: Path, tokens: list[int], dtype: torch.dtype) -> Tensor:
    """[len(tokens), vocabulary] from transformers."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    if not json.loads((folder / "config.json").read_text()).get("use_qk_norm", True):
        for layer in model.model.layers:
            layer.self_attn.q_norm = layer.self_attn.k_norm = torch.nn.Identity()
    with _wide(dtype), torch.inference_mode():
        model.model.rotary_emb = Qwen3RotaryEmbedding(model.config)
        return model(torch.tensor([tokens])).logits[0]


def reference_greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    """`count` most likely tokens after the prompt, in float64."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(folder, tokens, torch.float64)[-1].argmax()))
    return tokens[len(prompt) :]


@contextlib.contextmanager
def _wide(dtype: torch.dtype) -> Iterator[None]:
    """transformers computes norms, rotations and softmax in float32 by name: in a float64 model the name must lie."""
    if dtype != torch.float64:
        yield
        return
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield
