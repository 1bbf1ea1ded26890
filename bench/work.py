"""What the benchmarks of whole models compute, and the model shapes that they know by name."""

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shared.model_config import load_model_config
from tandem.bench.work import Item
from tandem.models import model_folder
from tandem.tiny import DENSE

MODEL_HELP = "qwen3-0.6b, qwen3-8b, qwen3-30b-a3b, qwen3-235b-a22b, or a model folder"
SEQUENCES = 256
"""Most sequences that benchmarks of whole models run at a time."""
CONTEXT = 4096
"""Most tokens of one of them."""
PREFILL = 2048
"""Tokens of the prompts of the prefill point, if the model takes so many."""
RATE = "tokens/s"
MIXED = "mixed work"
"""The point of mixed_lengths()."""

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151_645,
}
_QWEN3_MOE: dict[str, Any] = {
    **_QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings")
SHAPES: dict[str, dict[str, Any]] = {
    name: {**family, **dict(zip(_SIZES, sizes, strict=True)), **more}
    for name, family, sizes, more in (
        ("qwen3-0.6b", _QWEN3, (1024, 3072, 28, 16, True), {}),
        ("qwen3-8b", _QWEN3, (4096, 12_288, 36, 32, False), {}),
        ("qwen3-30b-a3b", _QWEN3_MOE, (2048, 6144, 48, 32, False), {"moe_intermediate_size": 768}),
        ("qwen3-235b-a22b", _QWEN3_MOE, (4096, 12_288, 94, 64, False), {"moe_intermediate_size": 1536}),
    )
}


def mixed_lengths() -> list[Item]:
    """The work of nano-vllm's bench.py: 256 requests, prompts and outputs of 100 to 1,024 tokens, 133,966 of output."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    return [Item(prompt, rng.randint(100, 1024)) for prompt in prompts]


def mixed_contexts(left: int) -> list[int]:
    """Tokens of the mixed work's sequences when at most `left` still run, had all begun at once."""
    items = sorted(mixed_lengths(), key=lambda item: -item.output_length)
    done = items[left].output_length if left < len(items) else 0
    return [len(item.prompt) + done for item in mixed_lengths() if item.output_length > done]


def decode_name(batch: int) -> str:
    """The point of random_items(batch, ...)."""
    return f"decode, batch {batch}"


def context_of(folder: Path) -> int:
    """Most tokens of a sequence of the model in a folder."""
    return min(CONTEXT, load_model_config(folder).max_position)


def prefill_length(context: int) -> int:
    """Of the prompts of the prefill point: one token of output must fit."""
    return min(PREFILL, context - 1)


def prefill_name(length: int) -> str:
    """The point of random_items(32, length, 1)."""
    return f"prefill, 32 x {length}"


@contextmanager
def bench_model(name: str) -> Iterator[tuple[Path, str]]:
    """The folder of a model and how to load it: a shape by name gets random weights, and the tiny model's tokenizer."""
    if name not in SHAPES:
        yield model_folder(name), "auto"
        return
    with TemporaryDirectory(prefix="bench-model-") as scratch:
        folder = Path(scratch) / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(SHAPES[name]), encoding="utf-8")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DENSE / file, folder)
        yield folder, "dummy"
