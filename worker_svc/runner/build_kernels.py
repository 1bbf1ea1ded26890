"""Puts the kernel runner of one GPU together, and measures what memory is left for K/V."""

import structlog
import torch

from shared.errors import StartupError
from shared.model_config import ModelConfig
from worker_svc.config import WorkerConfig
from worker_svc.layers.flash_attention import Heads, choose_flash
from worker_svc.layers.kv_cache import block_bytes
from worker_svc.layers.linear import kv_heads_per_rank
from worker_svc.parallel import TensorParallel
from worker_svc.runner.batch import BatchState
from worker_svc.runner.build import make_cache, make_limits
from worker_svc.runner.device_state import DeviceState
from worker_svc.runner.kernel_runner import KernelRunner
from worker_svc.runner.lanes import Lanes
from worker_svc.runner.programs import Programs
from worker_svc.runner.row_sampler import RowSampler
from worker_svc.runner.runner import CausalModel
from worker_svc.runner.step_kernels import GpuAttention, StepKernels

_log = structlog.get_logger(__name__)

_RESERVE = 256 << 20  # for what libraries take later, and for torch's own fragmentation
_PER_GRAPH = 4 << 20  # of launch parameters, beside the tensors that all graphs share


def build_kernel_runner(
    config: WorkerConfig, model_config: ModelConfig, model: CausalModel, group: TensorParallel, device: torch.device
) -> KernelRunner:
    """Raises StartupError where memory is short or an attention that was asked for is not installed."""
    attention = _attention(config, model_config, model, group, device)
    per_block = _block_bytes(config, model_config, model, group)
    num_blocks = config.num_kv_blocks
    if num_blocks is None:
        num_blocks = _memory_left(config, model_config, model, group, attention, device) // per_block
    num_blocks = group.minimum(num_blocks)
    if num_blocks <= 0:
        raise StartupError("no memory is left for K/V: lower --max-num-seqs or --max-num-batched-tokens")
    parts = RunnerParts(config, model_config, model, group, attention, num_blocks, device)
    prepare = parts.programs.run_all if config.enforce_eager else parts.programs.capture
    prepare(report=group.rank == 0)
    parts.kernels.update(torch.zeros(2, 1, dtype=torch.int32, device=device))  # compiles it
    return parts.runner()


class RunnerParts:
    """Everything of a runner that depends on its K/V memory."""

    def __init__(
        self,
        config: WorkerConfig,
        model_config: ModelConfig,
        model: CausalModel,
        group: TensorParallel,
        attention: GpuAttention,
        num_blocks: int,
        device: torch.device,
    ) -> None:
        self.cache = make_cache(config, model_config, group, num_blocks, model.head.weight.dtype, device)
        limits = make_limits(config, model_config, num_blocks, device)
        self.batch = BatchState(limits)
        self.state = DeviceState(limits, device)
        self.lanes = Lanes(len(self.state.values), limits.max_num_seqs, device)
        self.kernels = StepKernels(model, self.cache, self.state, limits, attention, self.lanes.ring)
        self.programs = Programs(self.kernels, limits, mixed=attention.flash is not None)
        self.sampler = RowSampler(model.head, limits, device)
        self._attention = attention

    def runner(self) -> KernelRunner:
        """All of it as one; what ran before, to compile or to capture, has left nothing."""
        self.lanes.restart()
        return KernelRunner(
            self._attention, self.cache, self.batch, self.state, self.kernels, self.programs, self.sampler, self.lanes
        )


def _attention(
    config: WorkerConfig, model_config: ModelConfig, model: CausalModel, group: TensorParallel, device: torch.device
) -> GpuAttention:
    heads = Heads(
        model_config.num_heads // group.size,
        kv_heads_per_rank(model_config.num_kv_heads, group),
        model_config.head_dim,
        model.head.weight.dtype,
    )
    capability = torch.cuda.get_device_capability(device)
    flash = choose_flash(config.attention, heads, config.block_size, capability)
    own_decode = flash is None or config.attention != flash.name
    return GpuAttention(flash, own_decode, pdl=capability >= (9, 0))


def _block_bytes(config: WorkerConfig, model_config: ModelConfig, model: CausalModel, group: TensorParallel) -> int:
    kv_heads = kv_heads_per_rank(model_config.num_kv_heads, group)
    dtype = model.head.weight.dtype
    return block_bytes(model_config.num_layers, config.block_size, kv_heads, model_config.head_dim, dtype)


def _memory_left(
    config: WorkerConfig,
    model_config: ModelConfig,
    model: CausalModel,
    group: TensorParallel,
    attention: GpuAttention,
    device: torch.device,
) -> int:
    """Bytes for K/V, measured: the largest steps run with one block, then what they left free is read."""
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory << 20
    parts = RunnerParts(config, model_config, model, group, attention, 1, device)
    parts.programs.warm_up()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_allocated(device)  # graphs take as much again
    with torch.inference_mode():
        parts.sampler.warm_up(parts.kernels.logits)
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    num_graphs = parts.programs.num_graphs
    del parts
    torch.cuda.empty_cache()
    graphs = 0 if config.enforce_eager else peak + _PER_GRAPH * num_graphs
    budget = int(total * config.gpu_memory_utilization) - (total - free) - graphs - _RESERVE
    _log.info("GPU memory", total_gib=total >> 30, left_for_kv_gib=round(budget / (1 << 30), 1))
    return budget
