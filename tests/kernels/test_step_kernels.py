"""What ranks exchange while they sample has one shape on all of them, whatever part of the vocabulary each has."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.model_config import load_model_config
from tests.kernels import COMPILED
from tests.worker.model_folder import edit_config, write_model
from worker_svc.config import WorkerConfig
from worker_svc.layers.triton_ops import TritonOps
from worker_svc.parallel import TensorParallel
from worker_svc.runner.build import empty_model
from worker_svc.runner.build_kernels import RunnerParts
from worker_svc.runner.step_kernels import GpuAttention

pytestmark = pytest.mark.skipif(COMPILED, reason="runs on a CPU in the interpreter")


def exchanged(folder: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that one of two ranks brings to its exchanges."""
    shapes = []

    def all_gather(_: TensorParallel, values: Tensor) -> Tensor:
        shapes.append(tuple(values.shape))
        return values[None]

    monkeypatch.setattr(TensorParallel, "all_gather", all_gather)
    config = WorkerConfig(str(folder), block_size=16, num_kv_blocks=4, max_num_seqs=1, max_num_batched_tokens=16)
    shape, group, device = load_model_config(folder), TensorParallel(rank, 2), torch.device("cpu")
    model = empty_model(config, shape, torch.float32, group, TritonOps(pdl=False), device)
    attention = GpuAttention(flash=None, own_decode=True, pdl=False)
    RunnerParts(config, shape, model, group, attention, 4, device).kernels.sample(1, narrow=True)
    return shapes


@pytest.mark.parametrize("vocabulary", [300, 131_000])
def test_ranks_exchange_the_same_shapes(tmp_path: Path, vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank has fewer tokens; of 131,000 fewer than 65,536, from which twice as many programs share a row."""
    folder = write_model(tmp_path, num_hidden_layers=1)
    edit_config(folder, vocab_size=vocabulary)
    first, last = (exchanged(folder, rank, monkeypatch) for rank in range(2))
    assert len(first) == 2 and first == last
