"""What a model folder and the settings allow together, checked before a rank starts. Knows no torch."""

from shared.errors import StartupError
from shared.model_config import ModelConfig
from worker_svc.config import WorkerConfig

ARCHITECTURES = ("Qwen3ForCausalLM",)


def check_model(config: WorkerConfig, model: ModelConfig) -> None:
    """Raises StartupError, naming what to change, for a model that these settings can't serve."""
    if model.architecture not in ARCHITECTURES:
        served = ", ".join(ARCHITECTURES)
        raise StartupError(f"{config.model}: the worker does not serve {model.architecture}; it serves {served}")
    check_degree(model, config.tensor_parallel)
    dtype_name(config, model)
    context_length(config, model)


def check_degree(model: ModelConfig, size: int) -> None:
    """Raises StartupError, naming the legal degrees, for a group size that the model's shapes don't allow."""
    if not _divides(model, size):
        legal = ", ".join(str(degree) for degree in range(1, model.num_heads + 1) if _divides(model, degree))
        raise StartupError(f"--tensor-parallel {size}: {model.name} can be split over {legal} ranks")


def _divides(model: ModelConfig, size: int) -> bool:
    """Query heads and feed-forward width are split evenly; K/V heads are split or replicated evenly."""
    kv_fits = model.num_kv_heads % size == 0 or size % model.num_kv_heads == 0
    return model.num_heads % size == 0 and model.intermediate_size % size == 0 and kv_fits


def dtype_name(config: WorkerConfig, model: ModelConfig) -> str:
    """Number format of weights and K/V."""
    name = model.dtype if config.dtype == "auto" else config.dtype
    if name not in ("float32", "bfloat16", "float64"):
        raise StartupError(f"{config.model}: weights are stored as {name}; choose --dtype float32 or bfloat16")
    return name


def context_length(config: WorkerConfig, model: ModelConfig) -> int:
    """Most tokens of one sequence. YaRN extends the positions that the model was first trained on."""
    extended = int(model.rope.original_max_position * model.rope.factor) if model.rope.kind == "yarn" else 0
    limit = max(model.max_position, extended)
    if config.max_model_len is not None and config.max_model_len > limit:
        raise StartupError(f"--max-model-len {config.max_model_len}: the model's positions end at {limit}")
    return config.max_model_len or limit
