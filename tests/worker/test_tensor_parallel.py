"""A group of any legal size gives the tokens of one rank (float64): real processes, real gloo."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from structlog.testing import capture_logs

from shared.errors import StartupError
from shared.model_config import load_model_config
from tests.patience import PATIENCE_S
from tests.worker.model_folder import write_model, write_moe_model
from tests.worker.tensor_parallel_rank import outputs
from worker_svc import parallel
from worker_svc.model_checks import check_degree
from worker_svc.parallel import TensorParallel, _connect, _peers, join
from worker_svc.store import Store

MODELS: dict[str, dict[str, Any]] = {
    "split K/V heads, tied": {},
    "one K/V head for all ranks, untied": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "bias, vocabulary that does not divide": {"attention_bias": True, "vocab_size": 333},
}
MOE_MODELS: dict[str, dict[str, Any]] = {
    "experts one by one": {"num_experts": 8},
    "experts fused, one dense layer": {"num_experts": 8, "fused": True, "mlp_only_layers": [0]},
}


@pytest.mark.parametrize("size", [2, 4])
def test_a_group_equals_one_rank(tmp_path: Path, size: int) -> None:
    specs = {name: {"model": str(write_model(tmp_path / name, **changes))} for name, changes in MODELS.items()}
    for name, changes in MOE_MODELS.items():
        folder = str(write_moe_model(tmp_path / name, norm_topk_prob=True, **changes))
        for expert_parallel in (False, True):
            specs[f"{name}, {expert_parallel=}"] = {"model": folder, "expert_parallel": expert_parallel}
    ranks = [start_rank(rank, size, tmp_path / "rendezvous", specs.values()) for rank in range(size)]
    results = [json.loads(rank.communicate(timeout=PATIENCE_S)[0].splitlines()[-1]) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks)
    assert all(result == results[0] for result in results), "the ranks disagree"
    alone = {folder: outputs(folder, TensorParallel()) for folder in {spec["model"] for spec in specs.values()}}
    for (name, spec), result in zip(specs.items(), results[0]["sampled"], strict=True):
        assert result == alone[spec["model"]], name


def test_gpus_of_several_nodes_leave_it_to_nccl() -> None:
    with mock.patch.object(torch.cuda, "can_device_access_peer", return_value=True), capture_logs() as logs:
        assert _peers(0, 4, 2, torch.device("cuda", 0)) is None
    (warning,) = logs
    assert warning["reason"] == "the ranks are on 2 nodes"


def test_ranks_on_other_devices_are_told_so() -> None:
    """As of --device auto, where one node's GPUs are missing: NCCL would wait for them for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        store = Store("127.0.0.1", listener.getsockname()[1], "epoch", 2)
        first = pool.submit(_connect, replace(store, listener=os.dup(listener.fileno())), 0, 2, torch.device("cuda"))
        with pytest.raises(StartupError, match="--device: rank 0 runs on cuda, rank 1 on cpu"):
            _connect(store, 1, 2, torch.device("cpu"))
        first.result()


def test_ranks_that_do_not_reach_each_other_say_which_ports_to_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a firewall that lets the store's port pass alone. Here the other rank never gets to its own part."""
    monkeypatch.setattr(parallel, "_TRIAL", timedelta(seconds=0.1))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        store = Store("127.0.0.1", listener.getsockname()[1], "epoch", 2)
        first = pool.submit(join, 0, 2, replace(store, listener=os.dup(listener.fileno())), torch.device("cpu"))
        _connect(store, 1, 2, torch.device("cpu"))
        with pytest.raises(StartupError, match=r"rank 0 can't connect .* all TCP ports above 1024 .* interface lo"):
            first.result(PATIENCE_S)


def test_gpus_that_do_not_reach_each_other_leave_it_to_nccl() -> None:
    with mock.patch.object(torch.cuda, "can_device_access_peer", return_value=False), capture_logs() as logs:
        assert _peers(0, 2, 1, torch.device("cuda", 0)) is None
    (warning,) = logs
    assert warning["reason"] == "GPU 0 can't reach the memory of GPU 1"


def start_rank(rank: int, size: int, rendezvous: Path, specs: Iterable[dict[str, Any]]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.worker.tensor_parallel_rank", str(rank), str(size), str(rendezvous)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, *map(json.dumps, specs)], stdout=subprocess.PIPE, text=True, env=environment)


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
        check_degree(model, size, expert_parallel=False)


@pytest.mark.parametrize(
    ("size", "nnodes", "legal"),
    [(1, 2, "2, 4 ranks on --nnodes 2"), (2, 4, "4 ranks on --nnodes 4"), (3, 3, "no number of")],
)
def test_degrees_that_nodes_do_not_allow(tmp_path: Path, size: int, nnodes: int, legal: str) -> None:
    model = load_model_config(write_model(tmp_path))
    with pytest.raises(StartupError, match=f"--tensor-parallel {size}: .* can be split over {legal}"):
        check_degree(model, size, expert_parallel=False, nnodes=nnodes)


@pytest.mark.parametrize(
    ("changes", "size", "expert_parallel", "legal"),
    [
        ({"moe_intermediate_size": 42}, 4, False, "1, 2 ranks"),
        ({"num_experts": 6}, 4, True, "1, 2 ranks with --expert-parallel"),
        ({"mlp_only_layers": [0], "intermediate_size": 98, "num_experts": 8}, 4, True, "1, 2 ranks"),
        ({"intermediate_size": 97, "num_experts": 8}, 3, True, "1, 2, 4 ranks"),
    ],
)
def test_degrees_that_experts_do_not_allow(
    tmp_path: Path, changes: dict[str, Any], size: int, expert_parallel: bool, legal: str
) -> None:
    """The width of dense layers counts where there are any."""
    model = load_model_config(write_moe_model(tmp_path, **changes))
    with pytest.raises(StartupError, match=f"over {legal}"):
        check_degree(model, size, expert_parallel)
