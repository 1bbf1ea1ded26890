"""Puts one rank's runner together: model, weights, K/V memory, sampler."""

import torch

from shared.errors import StartupError
from shared.model_config import ModelConfig
from worker_svc.config import WorkerConfig
from worker_svc.layers.attention import AttentionBackend, TorchAttention
from worker_svc.layers.kv_cache import KVCache, block_bytes
from worker_svc.layers.linear import kv_heads_per_rank
from worker_svc.layers.sampler import Sampler
from worker_svc.loading import load_weights
from worker_svc.model_checks import context_length, dtype_name
from worker_svc.models.qwen3 import Qwen3ForCausalLM
from worker_svc.parallel import TensorParallel
from worker_svc.runner.batch import BatchState, Limits
from worker_svc.runner.runner import ModelRunner

_ATTENTION: dict[str, type[AttentionBackend]] = {"auto": TorchAttention, "torch": TorchAttention}


def build_runner(config: WorkerConfig, model_config: ModelConfig, group: TensorParallel) -> ModelRunner:
    """Loads the weights and takes the K/V memory. Raises StartupError for a folder that is not whole."""
    torch.set_num_threads(config.threads)
    dtype: torch.dtype = getattr(torch, dtype_name(config, model_config))
    context = context_length(config, model_config)
    model = _empty_model(model_config, context, dtype, group)
    load_weights(model, config.folder, report=group.rank == 0)
    cache = _kv_cache(config, model_config, dtype, group)
    limits = Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=context,
        block_size=config.block_size,
        num_blocks=cache.num_blocks,
        vocabulary_size=model_config.vocabulary_size,
    )
    sampler = Sampler(group, model.head.start, model_config.vocabulary_size)
    return ModelRunner(model, cache, BatchState(limits), _ATTENTION[config.attention](), sampler)


def _empty_model(config: ModelConfig, context: int, dtype: torch.dtype, group: TensorParallel) -> Qwen3ForCausalLM:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return Qwen3ForCausalLM(config, context, dtype, group).requires_grad_(False)
    finally:
        torch.set_default_dtype(previous)


def _kv_cache(config: WorkerConfig, model: ModelConfig, dtype: torch.dtype, group: TensorParallel) -> KVCache:
    kv_heads = kv_heads_per_rank(model.num_kv_heads, group)
    per_block = block_bytes(model.num_layers, config.block_size, kv_heads, model.head_dim, dtype)
    num_blocks = group.minimum(config.num_kv_blocks or (config.kv_cache_memory << 20) // per_block)
    if num_blocks == 0:
        raise StartupError(f"--kv-cache-memory {config.kv_cache_memory}: one block takes {per_block} bytes")
    try:
        return KVCache(model.num_layers, num_blocks, config.block_size, kv_heads, model.head_dim, dtype)
    except RuntimeError:  # torch's kind for no memory, on every device
        size = f"{num_blocks} K/V blocks take {num_blocks * per_block >> 20} MiB per rank, more than there is"
        raise StartupError(f"{size}: choose a smaller --kv-cache-memory or --num-kv-blocks") from None
