"""A group of any legal size gives the tokens of one rank (float64): real processes, real gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from structlog.testing import capture_logs

from shared.errors import StartupError
from shared.model_config import load_model_config
from tests.worker.model_folder import write_model
from tests.worker.tensor_parallel_rank import outputs
from worker_svc.model_checks import check_degree
from worker_svc.parallel import TensorParallel, _peers

MODELS = {
    "split K/V heads, tied": {},
    "one K/V head for all ranks, untied": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "bias, vocabulary that does not divide": {"attention_bias": True, "vocab_size": 333},
}


@pytest.mark.parametrize("size", [2, 4])
def test_a_group_equals_one_rank(tmp_path: Path, size: int) -> None:
    folders = [write_model(tmp_path / str(i), seed=i, **changes) for i, changes in enumerate(MODELS.values())]
    ranks = [start_rank(rank, size, tmp_path / "rendezvous", folders) for rank in range(size)]
    results = [json.loads(rank.communicate(timeout=120)[0].splitlines()[-1]) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks)
    assert all(result == results[0] for result in results), "the ranks disagree"
    for name, folder, result in zip(MODELS, folders, results[0]["sampled"], strict=True):
        assert result == outputs(folder, TensorParallel()), name


def test_gpus_that_do_not_reach_each_other_leave_it_to_nccl() -> None:
    with mock.patch.object(torch.cuda, "can_device_access_peer", return_value=False), capture_logs() as logs:
        assert _peers(0, 2, torch.device("cuda", 0)) is None
    (warning,) = logs
    assert warning["reason"] == "GPU 0 can't reach the memory of GPU 1"


def start_rank(rank: int, size: int, rendezvous: Path, folders: list[Path]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.worker.tensor_parallel_rank", str(rank), str(size), str(rendezvous)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, *map(str, folders)], stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize(
    ("changes", "size", "legal"),
    [
        ({}, 3, "1, 2, 4"),
        ({}, 8, "1, 2, 4"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "1, 3, 6"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 64}, 3, "1, 2"),
    ],
)
def test_degrees_that_do_not_divide_are_refused(tmp_path: Path, changes: dict[str, int], size: int, legal: str) -> None:
    model = load_model_config(write_model(tmp_path, **changes))
    with pytest.raises(StartupError, match=f"over {legal} ranks"):
        check_degree(model, size)
