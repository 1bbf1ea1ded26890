"""What the nodes of a worker group over several hosts must agree on. Pure.

A node is one launcher with the ranks on its host. Knows nothing of connections: see node_link.
"""

from collections.abc import Mapping

from shared import __version__
from shared.model_config import ModelConfig
from worker_svc.config import WorkerConfig
from worker_svc.model_checks import context_length, dtype_name

_AS_GIVEN = (
    "nnodes",
    "tensor_parallel",
    "expert_parallel",
    "device",
    "load_format",
    "load_seed",
    "block_size",
    "enforce_eager",
    "max_num_seqs",
    "max_num_batched_tokens",
    "attention",
    "step_timeout",
)
"""Settings that change what the ranks compute together, or in which order, and how long a node may be silent. The pool
is the smallest of all nodes'."""


def terms(config: WorkerConfig, model: ModelConfig) -> dict[str, str]:
    """What all nodes must have alike, by what a person would change."""
    given = {"--" + name.replace("_", "-"): _told(getattr(config, name)) for name in _AS_GIVEN}
    return {
        "version": __version__,
        "--model": f"{model.name} ({model.fingerprint})",
        "--dtype": dtype_name(config, model),
        "--max-model-len": str(context_length(config, model)),
        **given,
    }


def difference(first: Mapping[str, str], other: Mapping[str, str], node_rank: int) -> str | None:
    """The first thing that node 0 and another one don't have alike, naming both sides; None: there is none."""
    for name in {**first, **other}:
        if first.get(name) != other.get(name):
            return f"{name}: node 0 has {_told(first.get(name))}, node {node_rank} has {_told(other.get(name))}"
    return None


def _told(value: object) -> str:
    return "none" if value is None else str(value)
