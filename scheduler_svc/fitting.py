"""Whether worker groups fit the scheduler and each other, and the core's configuration that follows from the first."""

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core import CoreConfig
from shared.types import WorkerDescription


def foreign(worker: WorkerDescription, config: SchedulerConfig, fingerprint: str) -> str:
    """Why the worker can't serve this scheduler's model; empty if it can."""
    if worker.fingerprint == fingerprint:
        return ""
    return (
        f"serves {worker.model_name} (fingerprint {worker.fingerprint}), not the model in {config.model} "
        f"(fingerprint {fingerprint}): start both with the same model"
    )


def smaller(worker: WorkerDescription, core: CoreConfig) -> str:
    """Why the worker can't take the plans of a core that another worker was the measure of; empty if it can."""
    for name in ("block_size", "vocabulary_size"):
        if getattr(worker, name) != getattr(core, name):
            return f"has {name} {getattr(worker, name)}, the first one had {getattr(core, name)}"
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_length"):
        if getattr(worker, name) < getattr(core, name):
            return f"has {name} {getattr(worker, name)}, the first one had {getattr(core, name)}"
    return ""


def core_config(config: SchedulerConfig, worker: WorkerDescription, hash_seed: int) -> CoreConfig:
    """What the operator asked for, as far as the worker can. Raises StartupError where that contradicts itself."""
    most_seqs, most_tokens = worker.max_num_seqs, worker.max_num_batched_tokens
    return CoreConfig(
        vocabulary_size=worker.vocabulary_size,
        max_model_length=worker.max_model_length,
        block_size=worker.block_size,
        max_num_seqs=min(config.max_num_seqs or most_seqs, most_seqs),
        max_num_batched_tokens=min(config.max_num_batched_tokens or most_tokens, most_tokens),
        max_queue=config.max_queue,
        max_queue_tokens=config.max_queue_tokens,
        hash_seed=hash_seed,
    )
