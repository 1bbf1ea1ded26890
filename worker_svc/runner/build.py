"""Puts one rank's runner together: model, weights, K/V memory, sampler, and on a GPU its kernels and graphs."""

import gc
from pathlib import Path

import structlog
import torch

from shared.errors import StartupError
from shared.model_config import ModelConfig
from worker_svc.config import WorkerConfig
from worker_svc.layers.kv_cache import KVCache, block_bytes
from worker_svc.layers.linear import kv_heads_per_rank
from worker_svc.layers.ops import Ops
from worker_svc.layers.torch_ops import TorchOps
from worker_svc.loading import fill_at_random, load_weights
from worker_svc.model_checks import context_length, dtype_name
from worker_svc.models.qwen3 import Qwen3ForCausalLM
from worker_svc.models.qwen3_moe import Qwen3MoeForCausalLM
from worker_svc.parallel import TensorParallel, join
from worker_svc.runner.batch import BatchState, Limits
from worker_svc.runner.row_sampler import RowSampler
from worker_svc.runner.runner import Runner, TorchRunner
from worker_svc.store import Store

_log = structlog.get_logger(__name__)

_CPU_CACHE_MIB = 1024


def choose_device(config: WorkerConfig, rank: int) -> torch.device:
    """The rank's device, made current. Raises StartupError where its node does not have it."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if (index := rank - config.ranks.start) >= torch.cuda.device_count():
        raise StartupError(f"--device cuda: {len(config.ranks)} GPUs are needed, there are {torch.cuda.device_count()}")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def start_rank(
    config: WorkerConfig, model_config: ModelConfig, rank: int, rendezvous: Path | Store
) -> tuple[Runner, TensorParallel]:
    """Joins the other ranks and builds this one's runner. Raises StartupError."""
    device = choose_device(config, rank)
    group = join(rank, config.tensor_parallel, rendezvous, device)
    runner = build_runner(config, model_config, group, device)
    gc.freeze()  # what the start has made lives as long as the process: a collection that looks at it stalls all ranks
    gc.enable()
    return runner, group


def build_runner(
    config: WorkerConfig, model_config: ModelConfig, group: TensorParallel, device: torch.device | None = None
) -> Runner:
    """Loads the weights, takes the K/V memory, captures graphs. Raises StartupError for a folder that is not whole."""
    device = device or torch.device("cpu")
    torch.set_num_threads(config.threads)
    dtype: torch.dtype = getattr(torch, dtype_name(config, model_config))
    kernels = _kernels(config, model_config, dtype, group, device)
    model = empty_model(config, model_config, dtype, group, kernels, device)
    if config.load_format == "dummy":
        fill_at_random(model, config.load_seed)
    else:
        load_weights(model, config.folder, report=group.rank == 0)
    if isinstance(kernels, TorchOps):
        return _torch_runner(config, model_config, model, group, dtype, device)
    from worker_svc.runner.build_kernels import build_kernel_runner

    return build_kernel_runner(config, model_config, model, group, device)


def _kernels(
    config: WorkerConfig, model: ModelConfig, dtype: torch.dtype, group: TensorParallel, device: torch.device
) -> Ops:
    """The fused kernels where they can run, torch elsewhere. Raises StartupError where they were asked for."""
    if config.attention == "torch":
        return TorchOps(group)
    problem = _unfit(config, model, dtype, device)
    if problem is None:
        from worker_svc.layers.triton_ops import TritonOps, prefer_cublaslt

        prefer_cublaslt()
        return TritonOps(torch.cuda.get_device_capability(device) >= (9, 0), group)
    if config.attention != "auto":
        raise StartupError(f"--attention {config.attention}: {problem}")
    if device.type == "cuda":
        _log.warning("the torch reference computes everything: it is slow", reason=problem)
    return TorchOps(group)


def _unfit(config: WorkerConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernels can't run."""
    if device.type != "cuda":
        return "it needs a GPU"
    if dtype == torch.float64:
        return "there are no kernels for float64"
    if config.block_size % 16:
        return f"the kernels need blocks of a multiple of 16 tokens, not {config.block_size}"
    try:
        from worker_svc.kernels.launch import HEAD_DIMS
    except ModuleNotFoundError as missing:
        return f"{missing}: pip install 'tandem-serve[gpu]'"
    return None if model.head_dim in HEAD_DIMS else f"the kernels have no head_dim {model.head_dim}"


def empty_model(
    config: WorkerConfig,
    model_config: ModelConfig,
    dtype: torch.dtype,
    group: TensorParallel,
    ops: Ops,
    device: torch.device,
) -> Qwen3ForCausalLM:
    """The model that the folder describes, its weights to be filled."""
    context = context_length(config, model_config)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = (
                Qwen3ForCausalLM(model_config, context, dtype, group, ops)
                if model_config.moe is None
                else Qwen3MoeForCausalLM(model_config, context, dtype, group, ops, config.expert_parallel)
            )
            return model.requires_grad_(False)
    finally:
        torch.set_default_dtype(previous)


def _torch_runner(
    config: WorkerConfig,
    model_config: ModelConfig,
    model: Qwen3ForCausalLM,
    group: TensorParallel,
    dtype: torch.dtype,
    device: torch.device,
) -> TorchRunner:
    kv_heads = kv_heads_per_rank(model_config.num_kv_heads, group)
    per_block = block_bytes(model_config.num_layers, config.block_size, kv_heads, model_config.head_dim, dtype)
    memory = config.kv_cache_memory or _CPU_CACHE_MIB
    num_blocks = group.minimum(config.num_kv_blocks or (memory << 20) // per_block)
    if num_blocks == 0:
        raise StartupError(f"--kv-cache-memory {memory}: one block takes {per_block} bytes")
    cache = make_cache(config, model_config, group, num_blocks, dtype, device)
    batch = BatchState(make_limits(config, model_config, num_blocks, device))
    return TorchRunner(model, cache, batch, RowSampler(model.head, batch.limits, device), device)


def make_cache(
    config: WorkerConfig,
    model: ModelConfig,
    group: TensorParallel,
    num_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    """The K/V memory of one rank. Raises StartupError where there is less."""
    kv_heads = kv_heads_per_rank(model.num_kv_heads, group)
    try:
        return KVCache(model.num_layers, num_blocks, config.block_size, kv_heads, model.head_dim, dtype, device)
    except RuntimeError:  # torch's kind for no memory, on every device
        per_block = block_bytes(model.num_layers, config.block_size, kv_heads, model.head_dim, dtype)
        size = f"{num_blocks} K/V blocks take {num_blocks * per_block >> 20} MiB per rank, more than there is"
        raise StartupError(f"{size}: choose a smaller --kv-cache-memory or --num-kv-blocks") from None


def make_limits(config: WorkerConfig, model: ModelConfig, num_blocks: int, device: torch.device) -> Limits:
    """The bounds of plans."""
    max_num_seqs, max_num_batched_tokens = config.batch_size(device.type == "cuda", model.moe is not None)
    return Limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=context_length(config, model),
        block_size=config.block_size,
        num_blocks=num_blocks,
        vocabulary_size=model.vocabulary_size,
    )
