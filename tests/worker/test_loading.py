"""A checkpoint is loaded whole or refused by the name of what is wrong; each rank reads its own slices."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.errors import StartupError
from shared.model_config import load_model_config
from tests.worker.model_folder import VOCABULARY, edit_config, write_model
from tests.worker.planner import make_runner
from worker_svc.config import WorkerConfig
from worker_svc.layers.torch_ops import TorchOps
from worker_svc.loading import load_weights
from worker_svc.model_checks import check_model
from worker_svc.models.qwen3 import Qwen3ForCausalLM
from worker_svc.parallel import TensorParallel

K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def save(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")


def split_with_index(folder: Path) -> None:
    """Two files and an index, as large checkpoints have."""
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for part in set(weight_map.values()):
        save_file({name: tensor for name, tensor in tensors.items() if weight_map[name] == part}, folder / part)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def state(folder: Path) -> dict[str, Tensor]:
    return make_runner(folder).model.state_dict()


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=0, rtol=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path, tie_word_embeddings=False)


def test_the_index_is_honoured_and_a_stray_file_ignored(folder: Path) -> None:
    expected = state(folder)
    stray = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(folder).items()}
    split_with_index(folder)
    save_file(stray, folder / "consolidated.safetensors")
    assert_same(state(folder), expected)


def test_a_tied_model_may_store_its_lm_head(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    expected, tensors = state(folder), tensors_of(folder)
    assert "lm_head.weight" not in tensors
    save(folder, {**tensors, "lm_head.weight": torch.zeros(VOCABULARY, 64)})
    assert_same(state(folder), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_stored_bfloat16_in_any_format(folder: Path, dtype: str) -> None:
    save(folder, {name: tensor.bfloat16() for name, tensor in tensors_of(folder).items()})
    edit_config(folder, dtype="bfloat16")
    weight = make_runner(folder, dtype=dtype).model.model.norm.weight
    assert weight.dtype == getattr(torch, dtype)
    assert torch.equal(weight, tensors_of(folder)["model.norm.weight"].to(weight.dtype))


def test_packed_parameters_hold_their_parts_in_order(folder: Path) -> None:
    tensors, loaded = tensors_of(folder), state(folder)
    for packed, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
        prefix = "model.layers.1." + packed.split(".")[0]
        expected = torch.cat([tensors[f"{prefix}.{part}_proj.weight"] for part in parts])
        assert torch.equal(loaded[f"model.layers.1.{packed}.weight"], expected.double())


@pytest.mark.parametrize("name", [K_PROJ, "lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"])
def test_a_missing_tensor(folder: Path, name: str) -> None:
    tensors = tensors_of(folder)
    del tensors[name]
    save(folder, tensors)
    with pytest.raises(StartupError, match=name):
        state(folder)


def test_a_tensor_in_two_files(folder: Path) -> None:
    save_file({K_PROJ: tensors_of(folder)[K_PROJ]}, folder / "again.safetensors")
    with pytest.raises(StartupError, match=K_PROJ):
        state(folder)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight"])
def test_a_tensor_that_the_config_does_not_know(folder: Path, name: str) -> None:
    """Left out silently, a bias or a layer would be garbage."""
    save(folder, {**tensors_of(folder), name: torch.zeros(1)})
    with pytest.raises(StartupError, match=name):
        state(folder)


def test_a_tensor_of_another_shape(folder: Path) -> None:
    save(folder, {**tensors_of(folder), K_PROJ: torch.zeros(32, 64)})
    with pytest.raises(StartupError, match=rf"{K_PROJ} has shape \[32, 64\], the model needs \[64, 64\]"):
        state(folder)


def test_an_index_that_lies(folder: Path) -> None:
    split_with_index(folder)
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map[K_PROJ] = next(file for file in weight_map.values() if file != weight_map[K_PROJ])
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(StartupError, match=K_PROJ):
        state(folder)


def test_a_file_of_the_index_that_is_missing(folder: Path) -> None:
    split_with_index(folder)
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(StartupError, match=r"part-1\.safetensors"):
        state(folder)


def test_a_truncated_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(StartupError, match=r"model\.safetensors"):
        state(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(StartupError, match="no safetensors file"):
        state(folder)


def test_a_parameter_that_no_shard_fills(folder: Path) -> None:
    model = Qwen3ForCausalLM(load_model_config(folder), 64, torch.float32, TensorParallel(), TorchOps())
    model.model.norm.extra = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(StartupError, match=r"model\.norm\.extra: 0 of 3"):
        load_weights(model, folder, report=False)


@pytest.mark.parametrize(
    ("changes", "settings", "named"),
    [
        ({"dtype": "float16"}, {}, "float16"),
        ({}, {"max_model_len": 513}, "512"),
        ({}, {"expert_parallel": True}, "--expert-parallel"),
    ],
)
def test_what_the_worker_does_not_serve(
    folder: Path, changes: dict[str, object], settings: dict[str, int], named: str
) -> None:
    edit_config(folder, **changes)
    with pytest.raises(StartupError, match=named):
        check_model(WorkerConfig(str(folder), **settings), load_model_config(folder))


def test_kv_memory_sets_the_number_of_blocks(folder: Path) -> None:
    runner = make_runner(folder, num_kv_blocks=None, kv_cache_memory=3)
    assert runner.batch.limits.num_blocks == 3 * 2**20 // (2 * 2 * 2 * 32 * 16 * 8)
    with pytest.raises(StartupError, match="--kv-cache-memory 1:"):
        make_runner(folder, num_kv_blocks=None, kv_cache_memory=1, block_size=10_000)


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        ("--tensor-parallel", {"tensor_parallel": 0}),
        ("--num-kv-blocks", {"num_kv_blocks": 0}),
        ("--dtype", {"dtype": "int8"}),
        ("--attention", {"attention": "flash"}),
        ("--port", {"port": 70_000}),
        ("--lease-timeout", {"lease_timeout": 0.9}),
        ("--drain-timeout", {"drain_timeout": float("nan")}),
    ],
)
def test_a_setting_out_of_range(flag: str, settings: dict[str, object]) -> None:
    with pytest.raises(StartupError, match=flag):
        WorkerConfig("model", **settings)  # type: ignore[arg-type]


def test_dummy_weights_need_no_checkpoint(tmp_path: Path) -> None:
    """The same for the same seed, others for another; norms are 1."""
    folder = write_model(tmp_path)
    (folder / "model.safetensors").unlink()
    first, again, other = (
        make_runner(folder, load_format="dummy", load_seed=seed).model.model.state_dict() for seed in (1, 1, 2)
    )
    for name, values in first.items():
        assert torch.equal(values, again[name])
        if "norm" in name:
            assert (values == 1).all()
        else:
            assert not torch.equal(values, other[name])
            assert 0.01 < float(values.std()) < 0.03
