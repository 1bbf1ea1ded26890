"""A worker's settings. Knows no torch, so that the command line reads it at no cost."""

from dataclasses import dataclass
from pathlib import Path

from shared.errors import StartupError
from shared.security import ServerSecurity, check_server
from shared.settings import check_bounds, check_distinct, flag

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float64")
ATTENTION = ("auto", "fa3", "fa2", "triton", "torch")
LOAD_FORMATS = ("auto", "dummy")
_COUNTS = (
    "tensor_parallel",
    "nnodes",
    "block_size",
    "num_kv_blocks",
    "kv_cache_memory",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "threads",
)


@dataclass(frozen=True, slots=True)
class WorkerConfig(ServerSecurity):
    """What `tandem worker` takes. Raises StartupError, naming the flag, for a value out of range."""

    model: str
    """Folder with config.json and the safetensors files."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 50052
    """Port to listen on; 0 takes a free one, which the ready line names."""
    metrics_port: int | None = None
    """Port of Prometheus metrics over HTTP, on the same host; None: there are none."""
    health_port: int | None = None
    """Port with nothing but the health service, in plain text, for probes that speak no TLS; None: there is none."""
    tensor_parallel: int = 1
    """Ranks that share the model, one process each, on all nodes together."""
    nnodes: int = 1
    """Nodes of the group: hosts or pods, each with as many of the ranks, started by a `tandem worker` of its own."""
    node_rank: int = 0
    """This node's number, from 0 on. Node 0 serves the group."""
    master_addr: str | None = None
    """Name or address of node 0; needed where there are several nodes."""
    master_port: int = 29500
    """Port on which the other nodes find node 0."""
    expert_parallel: bool = False
    """Ranks have whole experts each, in place of a part of every expert's width."""
    device: str = "auto"
    """Where the model runs: auto (cuda where there is a GPU), cpu or cuda."""
    load_format: str = "auto"
    """Weights: auto (the folder's safetensors files) or dummy (random ones; only config.json is read)."""
    load_seed: int = 0
    """Seed of dummy weights."""
    dtype: str = "auto"
    """Number format of weights and K/V: auto (as stored), float32, bfloat16 or float64."""
    block_size: int = 64
    """Tokens per K/V block."""
    num_kv_blocks: int | None = None
    """K/V blocks of the pool; None takes as many as `kv_cache_memory` holds."""
    kv_cache_memory: int | None = None
    """MiB of K/V memory per rank; None: 1024 on a CPU, what `gpu_memory_utilization` leaves on a GPU."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory for weights, activations, CUDA graphs and, from what is left, K/V."""
    enforce_eager: bool = False
    """Captures no CUDA graphs: starts faster, runs slower."""
    max_num_seqs: int | None = None
    """Slots of batch state: most sequences in flight at a time; None: 64 on a CPU, 256 on a GPU."""
    max_num_batched_tokens: int | None = None
    """Most tokens that one plan may compute; None: 512 on a CPU, on a GPU 3072, or 4096 of a model with experts."""
    max_model_len: int | None = None
    """Most tokens of one sequence; None takes the model's own limit."""
    attention: str = "auto"
    """What computes attention: auto, fa3 or fa2 (FlashAttention), triton (own kernel for decode) or torch."""
    lease_timeout: float = 3.0
    """Seconds without a plan, none being executed, after which a scheduler's stream ends; at least 1, because an idle
    scheduler sends one twice a second."""
    step_timeout: float = 10.0
    """Seconds without progress after which a rank counts as hung."""
    drain_timeout: float = 30.0
    """Seconds that a stopping worker lets the scheduler's stream go on, for sequences that no other worker takes."""
    threads: int = 1
    """CPU threads per rank for matrix operations."""

    def __post_init__(self) -> None:
        """Checks every value on its own; what depends on the model is checked when that is read."""
        check_bounds(self, _COUNTS, 1)
        if self.max_num_seqs and self.max_num_batched_tokens and self.max_num_batched_tokens < self.max_num_seqs:
            least = f"at least --max-num-seqs, {self.max_num_seqs}, is needed"
            raise StartupError(f"--max-num-batched-tokens {self.max_num_batched_tokens}: {least}")
        check_bounds(self, ("port",), 0, 65535)
        check_bounds(self, ("metrics_port", "health_port", "master_port"), 1, 65535)
        names = ("port", "health_port", "metrics_port", *(("master_port",) if self.nnodes > 1 else ()))
        check_distinct({flag(name): getattr(self, name) for name in names})
        check_bounds(self, ("node_rank",), 0, self.nnodes - 1)
        if self.nnodes > 1 and not self.master_addr:
            raise StartupError(f"--nnodes {self.nnodes}: --master-addr, the address of node 0, is needed")
        check_bounds(self, ("drain_timeout", "load_seed"), 0)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise StartupError(f"--gpu-memory-utilization {self.gpu_memory_utilization}: it is above 0, at most 1")
        check_bounds(self, ("lease_timeout",), 1)
        if not self.step_timeout > 0:
            raise StartupError(f"--step-timeout {self.step_timeout}: seconds above 0 are needed")
        _one_of("device", self.device, DEVICES)
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("attention", self.attention, ATTENTION)
        check_server(self)

    def batch_size(self, on_gpu: bool, experts: bool) -> tuple[int, int]:
        """`max_num_seqs` and `max_num_batched_tokens`, chosen where they are not given: one row of each always fits.

        A large step reads all experts, which more tokens share.
        """
        default_seqs, default_tokens = (256, 4096 if experts else 3072) if on_gpu else (64, 512)
        seqs = self.max_num_seqs or min(default_seqs, self.max_num_batched_tokens or default_seqs)
        return seqs, self.max_num_batched_tokens or max(default_tokens, seqs)

    @property
    def ranks(self) -> range:
        """Those of this node."""
        count = self.tensor_parallel // self.nnodes
        return range(self.node_rank * count, (self.node_rank + 1) * count)

    @property
    def folder(self) -> Path:
        """The model folder."""
        return Path(self.model)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise StartupError(f"{flag(name)} {value}: not among {', '.join(allowed)}")
