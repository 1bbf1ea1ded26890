"""What can't run here is one line that says why; what runs anywhere is chosen without being asked for."""

from pathlib import Path
from unittest import mock

import pytest
import torch

from shared.errors import StartupError
from tests.worker.model_folder import write_model
from tests.worker.planner import make_runner
from worker_svc.config import WorkerConfig
from worker_svc.runner.build import choose_device


def test_auto_is_the_cpu_where_there_is_no_gpu() -> None:
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        assert choose_device(WorkerConfig("model"), 0) == torch.device("cpu")


def test_a_gpu_for_each_rank() -> None:
    refused = pytest.raises(StartupError, match="--device cuda: 2 GPUs are needed, there are 1")
    with mock.patch.object(torch.cuda, "device_count", return_value=1), refused:
        choose_device(WorkerConfig("model", device="cuda", tensor_parallel=2), 1)


def test_a_node_s_ranks_have_its_own_gpus() -> None:
    config = WorkerConfig("model", device="cuda", tensor_parallel=4, nnodes=2, node_rank=1, master_addr="leader")
    chosen = mock.patch.object(torch.cuda, "set_device")
    with mock.patch.object(torch.cuda, "device_count", return_value=2), chosen:
        assert [choose_device(config, rank).index for rank in config.ranks] == [0, 1]


@pytest.mark.parametrize("attention", ["fa3", "fa2", "triton"])
def test_attention_that_needs_a_gpu(tmp_path: Path, attention: str) -> None:
    with pytest.raises(StartupError, match=f"--attention {attention}: it needs a GPU"):
        make_runner(write_model(tmp_path), attention=attention)


@pytest.mark.parametrize("setting", ["device", "load_format", "attention"])
def test_names_that_do_not_exist(setting: str) -> None:
    flag = "--" + setting.replace("_", "-")
    with pytest.raises(StartupError, match=f"{flag} tpu: not among auto"):
        WorkerConfig("model", **{setting: "tpu"})


@pytest.mark.parametrize("share", [0.0, 1.5, float("nan")])
def test_a_share_of_memory(share: float) -> None:
    with pytest.raises(StartupError, match="--gpu-memory-utilization"):
        WorkerConfig("model", gpu_memory_utilization=share)
