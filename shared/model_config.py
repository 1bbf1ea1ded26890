"""Reads a model folder's JSON files: architecture, shapes, positions, end-of-sequence tokens, sampling defaults.

Both spellings of transformers 4 and 5 are read. Needs neither torch nor transformers, so the scheduler can use it.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shared.errors import StartupError
from shared.json_config import count, read_object
from shared.moe_config import MoeConfig, moe_config

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021), plain, linearly interpolated, or YaRN (Peng et al. 2023)."""

    kind: Literal["default", "linear", "yarn"]
    theta: float
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """Multiplies cos and sin; None means YaRN's 0.1 ln(factor) + 1."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    """Rounds YaRN's correction range to whole dimensions."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """generation_config.json's answer where a request is silent."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model folder, as far as JSON tells."""

    name: str
    fingerprint: str
    """Hash of config.json's content; scheduler and workers must agree on it."""
    architecture: str
    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    tie_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    dtype: str
    """Number format of the stored weights."""
    eos_token_ids: tuple[int, ...]
    """Union of generation_config.json, config.json and the tokenizer's, sorted."""
    sampling_defaults: SamplingDefaults
    moe: MoeConfig | None
    """None: every layer is dense."""


def load_model_config(folder: Path, name: str | None = None) -> ModelConfig:
    """Raises StartupError, naming the file and the key, for what is missing or not supported."""
    config = read_object(folder, "config.json", required=True)
    generation = read_object(folder, "generation_config.json")
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise StartupError(
            f"{folder}: architecture {architecture} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    for key, served in (("hidden_act", "silu"), ("use_sliding_window", False), ("partial_rotary_factor", 1.0)):
        if config.get(key, served) != served:
            raise StartupError(f"{folder / 'config.json'}: {key} {config[key]!r} is not supported, only {served!r}")
    try:
        num_layers = count(config, "num_hidden_layers")
        return ModelConfig(
            name=name or folder.resolve().name,
            fingerprint=hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16],
            architecture=architecture,
            vocabulary_size=count(config, "vocab_size"),
            hidden_size=count(config, "hidden_size"),
            intermediate_size=count(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=count(config, "num_attention_heads"),
            num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            head_dim=config.get("head_dim") or _default_head_dim(config, architecture),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope=_rope(config, folder),
            max_position=count(config, "max_position_embeddings"),
            tie_embeddings=config.get("tie_word_embeddings", False),
            attention_bias=config.get("attention_bias", False),
            qk_norm=config.get("use_qk_norm", True),
            dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
            eos_token_ids=_eos(config, generation, folder),
            sampling_defaults=_sampling_defaults(generation, folder),
            moe=moe_config(config, num_layers) if architecture == "Qwen3MoeForCausalLM" else None,
        )
    except KeyError as missing:
        raise StartupError(f"{folder / 'config.json'}: key {missing} is missing") from None
    except (TypeError, ValueError) as error:
        raise StartupError(f"{folder / 'config.json'}: {error}") from None


def _default_head_dim(config: dict[str, Any], architecture: str) -> int:
    """What transformers takes where the key is absent."""
    return 128 if architecture == "Qwen3ForCausalLM" else config["hidden_size"] // config["num_attention_heads"]


def _rope(config: dict[str, Any], folder: Path) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_theta` beside `rope_scaling`, whose type key was once `type`."""
    given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = given.get("rope_type") or given.get("type") or "default"
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    if kind == "default":
        return RopeConfig("default", theta)
    if kind not in ("linear", "yarn"):
        raise StartupError(f"{folder / 'config.json'}: rope type {kind!r} is not among default, linear, yarn")
    if "factor" not in given:
        raise StartupError(f"{folder / 'config.json'}: rope type {kind!r} needs a factor")
    if kind == "linear":
        return RopeConfig("linear", theta, float(given["factor"]))
    return RopeConfig(
        "yarn",
        theta,
        float(given["factor"]),
        given.get("original_max_position_embeddings") or config["max_position_embeddings"],
        given.get("beta_fast") or 32.0,
        given.get("beta_slow") or 1.0,
        given.get("attention_factor"),
        given.get("mscale"),
        given.get("mscale_all_dim"),
        given.get("truncate", True),
    )


def _eos(config: dict[str, Any], generation: dict[str, Any], folder: Path) -> tuple[int, ...]:
    ids: set[Any] = set()
    for value in (config.get("eos_token_id"), generation.get("eos_token_id"), _tokenizer_eos(folder)):
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    for token in ids:
        if type(token) is not int:
            raise StartupError(f"{folder}: eos_token_id {token!r} is no token id")
    return tuple(sorted(ids))


def _tokenizer_eos(folder: Path) -> int | None:
    """Id of tokenizer_config.json's eos_token among tokenizer.json's added tokens."""
    token = read_object(folder, "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    added = read_object(folder, "tokenizer.json").get("added_tokens", []) if text else []
    return next((entry["id"] for entry in added if entry["content"] == text), None)


def _sampling_defaults(generation: dict[str, Any], folder: Path) -> SamplingDefaults:
    """transformers writes its own default top_k = 50 only when set, so what is absent is off."""
    if generation.get("do_sample") is False:
        return SamplingDefaults(temperature=0.0)
    given = {key: generation[key] for key in SamplingDefaults.__dataclass_fields__ if generation.get(key) is not None}
    for key, value in given.items():
        if not _is_sampling_value(key, value):
            raise StartupError(f"{folder / 'generation_config.json'}: {key} can not be {value!r}")
    return SamplingDefaults(**given)


def _is_sampling_value(key: str, value: Any) -> bool:
    """The bounds of SamplingParams in generation.proto."""
    if key == "top_k":
        return isinstance(value, int) and 0 <= value < 1 << 31
    if not isinstance(value, int | float):
        return False
    if key == "repetition_penalty":
        return 0.01 <= value <= 100
    return 0 <= value <= 100 if key == "temperature" else 0 <= value <= 1 and (key, value) != ("top_p", 0)
