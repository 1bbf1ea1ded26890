"""A worker whose device computes nothing: `python -m bench.idle_worker PORT MODEL STEP_US`.

Everything of a worker on a GPU but the GPU: a step takes a set time and gives zeros. What is left is the host's part.
"""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import uvloop

from shared.model_config import load_model_config
from shared.process import die_with_parent
from shared.types import WorkerDescription
from worker_svc.config import WorkerConfig
from worker_svc.layers.embedding import VocabParallelEmbedding
from worker_svc.parallel import TensorParallel
from worker_svc.progress import Progress
from worker_svc.runner.batch import BatchState, Limits
from worker_svc.runner.device_state import DeviceState
from worker_svc.runner.group import GroupRunner
from worker_svc.runner.kernel_runner import KernelRunner
from worker_svc.runner.lanes import Lanes
from worker_svc.runner.row_sampler import RowSampler
from worker_svc.serve import WorkerServer
from worker_svc.stats import no_stats

SLOTS, TOKENS, BLOCKS, BLOCK_SIZE = 256, 3072, 16_384, 64


class Clock:
    """When the steps launched so far will have ended."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._end = 0.0

    def launch(self, *_: Any, **__: Any) -> None:
        """One step more."""
        self._end = max(self._end, time.perf_counter()) + self._step_s

    def event(self) -> "ClockEvent":
        """See lanes.Event."""
        return ClockEvent(self)

    @property
    def end(self) -> float:
        """Seconds of the performance counter."""
        return self._end


class ClockEvent:
    """See lanes.Event."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._end = 0.0

    def record(self) -> None:
        """See lanes.Event."""
        self._end = self._clock.end

    def synchronize(self) -> None:
        """See lanes.Event."""
        if (left := self._end - time.perf_counter()) > 0:
            time.sleep(left)


def idle_runner(vocabulary_size: int, max_model_len: int, step_s: float) -> KernelRunner:
    """A runner of which only the host's part is real."""
    limits = Limits(SLOTS, TOKENS, max_model_len, BLOCK_SIZE, BLOCKS, vocabulary_size)
    device, clock = torch.device("cpu"), Clock(step_s)
    state = DeviceState(limits, device)
    parts: Any = SimpleNamespace(
        attention=SimpleNamespace(name="none", flash=True),
        cache=SimpleNamespace(zero=lambda blocks: None),
        kernels=SimpleNamespace(update=lambda changes: None),
        programs=SimpleNamespace(
            decode_size=lambda rows: rows,
            mixed_size=lambda tokens, rows: (tokens, rows),
            decode=clock.launch,
            mixed=lambda bucket: None,
            sample=clock.launch,
        ),
    )
    lanes = Lanes(len(state.values), SLOTS, device, clock.event)
    sampler = RowSampler(VocabParallelEmbedding(vocabulary_size, 1, TensorParallel()), limits, device)
    return KernelRunner(
        parts.attention, parts.cache, BatchState(limits), state, parts.kernels, parts.programs, sampler, lanes
    )


async def serve(port: int, model: Path, step_s: float) -> None:
    """Until the process ends."""
    config, shape = WorkerConfig(str(model), port=port), load_model_config(model)
    runner = idle_runner(shape.vocabulary_size, shape.max_position, step_s)
    progress = Progress(np.zeros((1, 3)), 0)
    description = WorkerDescription(
        fingerprint=shape.fingerprint,
        model_name=shape.name,
        dtype="none",
        block_size=BLOCK_SIZE,
        num_blocks=BLOCKS,
        max_model_length=shape.max_position,
        vocabulary_size=shape.vocabulary_size,
        eos_token_ids=shape.eos_token_ids,
        tensor_parallel_size=1,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=TOKENS,
        version="0",
        attention="none",
    )
    server = WorkerServer(config, progress, no_stats())
    await server.start()
    await server.answer(GroupRunner(runner, TensorParallel(), progress), description)
    await server.watch()


if __name__ == "__main__":
    die_with_parent()
    torch.set_num_threads(1)
    uvloop.run(serve(int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]) / 1e6))
