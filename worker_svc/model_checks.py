"""What a model folder and the settings allow together, checked before a rank starts. Knows no torch."""

from shared.errors import StartupError
from shared.model_config import ModelConfig
from worker_svc.config import WorkerConfig


def check_model(config: WorkerConfig, model: ModelConfig) -> None:
    """Raises StartupError, naming what to change, for a model that these settings can't serve."""
    if config.expert_parallel and model.moe is None:
        raise StartupError(f"--expert-parallel: {model.name} has no experts")
    check_degree(model, config.tensor_parallel, config.expert_parallel, config.nnodes)
    dtype_name(config, model)
    context_length(config, model)


def check_degree(model: ModelConfig, size: int, expert_parallel: bool, nnodes: int = 1) -> None:
    """Raises StartupError, naming the legal degrees, for a group size that the model's shapes or nodes don't allow."""
    split = [model.num_heads, *_feed_forward(model, expert_parallel)]
    legal = [degree for degree in range(nnodes, model.num_heads + 1, nnodes) if _divides(model, split, degree)]
    if size not in legal:
        mode = " with --expert-parallel" if expert_parallel else ""
        where = f" on --nnodes {nnodes}" if nnodes > 1 else ""
        degrees = ", ".join(map(str, legal)) or "no number of"
        raise StartupError(f"--tensor-parallel {size}: {model.name} can be split over {degrees} ranks{where}{mode}")


def _feed_forward(model: ModelConfig, expert_parallel: bool) -> list[int]:
    """What of the feed-forward layers is split: the width of dense ones; of the others the experts or their width."""
    moe = model.moe
    if moe is None:
        return [model.intermediate_size]
    sparse = [moe.is_sparse(layer) for layer in range(model.num_layers)]
    dense_width = [] if all(sparse) else [model.intermediate_size]
    expert_count = [moe.num_experts if expert_parallel else moe.intermediate_size] if any(sparse) else []
    return dense_width + expert_count


def _divides(model: ModelConfig, split: list[int], size: int) -> bool:
    """Whether everything is split evenly; K/V heads may be replicated instead."""
    kv_fits = model.num_kv_heads % size == 0 or size % model.num_kv_heads == 0
    return kv_fits and all(count % size == 0 for count in split)


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
