"""Whether worker groups fit the scheduler and each other, and the core's configuration that follows from the first."""

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core import CoreConfig
from shared.types import WorkerDescription

MOST = {
    "block_size": 1 << 16,
    "num_blocks": 1 << 22,
    "max_model_length": 1 << 24,
    "vocabulary_size": 1 << 24,
    "max_num_seqs": 1 << 16,
    "max_num_batched_tokens": 1 << 24,
}
"""What the core makes tables of: far above any worker, and what is above would cost it its memory."""
MOST_TOKENS = 1 << 32
"""Of max_num_seqs sequences of max_model_length."""

EQUAL = {"block_size": "--block-size", "vocabulary_size": "a model of vocabulary_size", "dtype": "--dtype"}
LEAST = {
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_model_length": "--max-model-len",
}
"""What workers must agree in, and how much of it each must take, with the flag to change it by."""


def foreign(worker: WorkerDescription, config: SchedulerConfig, fingerprint: str) -> str:
    """Why the worker can't serve this scheduler's model; empty if it can."""
    if worker.fingerprint == fingerprint:
        return _absurd(worker)
    return (
        f"serves {worker.model_name} (fingerprint {worker.fingerprint}), not the model in {config.model} "
        f"(fingerprint {fingerprint}): start both with the same model"
    )


def _absurd(worker: WorkerDescription) -> str:
    for name, most in MOST.items():
        if not 1 <= getattr(worker, name) <= most:
            return f"has {name} {getattr(worker, name)}: must be within [1, {most}]"
    if worker.max_num_seqs * worker.max_model_length > MOST_TOKENS:
        return f"has max_num_seqs {worker.max_num_seqs} of {worker.max_model_length} tokens: at most {MOST_TOKENS} fit"
    if not all(0 <= token < worker.vocabulary_size for token in worker.eos_token_ids):
        return f"has eos_token_ids {worker.eos_token_ids}: must be within [0, {worker.vocabulary_size})"
    return ""


def misfit(worker: WorkerDescription, core: CoreConfig, first: WorkerDescription) -> str:
    """Why the worker can't take the plans of a core that the first one was the measure of; empty if it can.

    Another dtype would take them, but a request that moves there would go on with another text.
    """
    for name, flag in EQUAL.items():
        if (own := getattr(worker, name)) != (needed := getattr(first, name)):
            return f"has {name} {own}: start it with {flag} {needed}, as the workers that serve"
    for name, flag in LEAST.items():
        if (own := getattr(worker, name)) < (least := getattr(core, name)):
            remedy = f"start it with {flag} {least} or more"
            if name != "max_model_length":
                remedy += f", or the scheduler with {flag} {own}"
            return f"has {name} {own}: {remedy}"
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
