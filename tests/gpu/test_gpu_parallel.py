"""A group of two GPUs gives what one gives: sums, tokens, logits; captured or not."""

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from grpc.aio import AioRpcError
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from bench.work import SHAPES
from shared.pb import worker_pb2_grpc
from shared.rpc import make_channel
from shared.wire import plan_to_pb
from tests.gpu.parallel_rank import PROMPT, SUMS, brought, logits, tokens
from tests.worker.model_folder import write_model, write_moe_model
from tests.worker.planner import BLOCK, Planner
from tests.worker.test_launcher import port_of, running
from worker_svc.environment import rank_environment
from worker_svc.parallel import TensorParallel

RANKS = 2
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and a random 0.6B's logits in float32."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "small", head_dim=64)
    write_model(folder / "replicated", num_key_value_heads=1, tie_word_embeddings=False, vocab_size=333)
    write_moe_model(folder / "experts", head_dim=64, num_experts=16, num_experts_per_tok=4, norm_topk_prob=True)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPES["qwen3-0.6b"])).bfloat16()
        model.model.rotary_emb = Qwen3RotaryEmbedding(model.config)  # its frequencies were rounded, too
    model.save_pretrained(folder / "large")
    with torch.inference_mode():
        torch.save(model.float()(torch.tensor([PROMPT]).cuda()).logits[0, 191:199].cpu(), folder / "exact")
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    """Of each rank."""
    command = [sys.executable, "-m", "tests.gpu.parallel_rank"]
    environment = {**os.environ, **rank_environment()}
    ranks = [subprocess.Popen([*command, str(rank), str(RANKS), str(folder)], env=environment) for rank in range(RANKS)]
    try:
        assert [rank.wait(120) for rank in ranks] == [0] * RANKS
    finally:
        for rank in ranks:
            rank.kill()
    return [torch.load(folder / f"results{rank}") for rank in range(RANKS)]


def test_sums(results: list[dict[str, Any]]) -> None:
    assert all(result["direct"] for result in results), "the GPUs don't reach each other's memory"
    for index, shape in enumerate(SUMS):
        exact = torch.stack([brought(rank, shape).double() for rank in range(RANKS)]).sum(0)
        for way in ("eager", "replayed", "nccl"):
            first, second = (result["sums"][way][index] for result in results)
            assert torch.equal(first, second), f"the ranks disagree on {shape}, {way}"
            torch.testing.assert_close(first.double(), exact, rtol=2**-8, atol=0)


def test_gathers(results: list[dict[str, Any]]) -> None:
    for first, second in zip(*(result["gathers"] for result in results), strict=True):
        assert torch.equal(first, second)
        expected = [torch.arange(first.shape[1]) * (rank + 1) - (1 << 40) for rank in range(RANKS)]
        assert torch.equal(first, torch.stack(expected))


@pytest.mark.parametrize(
    ("run", "model"),
    [("small", "small"), ("replicated", "replicated"), ("experts", "experts"), ("whole experts", "experts")],
)
def test_tokens_are_those_of_one_gpu(folder: Path, results: list[dict[str, Any]], run: str, model: str) -> None:
    """Greedy, sampled, among the most likely 40, and of the whole distribution; K/V heads split or replicated, experts
    split or whole."""
    assert results[0][run] == results[1][run], "the ranks disagree"
    assert results[0][run] == tokens(folder / model, TensorParallel())


def test_graphs_give_what_eager_steps_give(results: list[dict[str, Any]]) -> None:
    assert results[0]["small"] == results[0]["small, eager"]


def test_logits_are_within_the_noise_of_bfloat16(folder: Path, results: list[dict[str, Any]]) -> None:
    """Both sizes of group compute in bfloat16, so each is compared with float32. Two ranks round what flows between the
    layers once more than one, each its part of the sum: sqrt(2) times the error, if there were no other.
    """
    exact = torch.load(folder / "exact")
    split = torch.cat([result["logits"] for result in results], dim=1)[:, : exact.shape[1]]
    whole = logits(folder / "large", TensorParallel())[:, : exact.shape[1]]
    error, error_of_one = (float((one - exact).norm() / exact.norm()) for one in (split, whole))
    print(f"relative error {error:.4f}, of one GPU {error_of_one:.4f}")
    assert error < 1.5 * error_of_one


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_in_the_middle_of_steps_ends_the_group(tmp_path: Path, folder: Path, rank: int) -> None:
    """The other one's GPU then waits in a kernel for words that never come."""

    async def scheduler(group: Any) -> None:
        channel = make_channel(f"127.0.0.1:{port_of(group)}")
        call = worker_pb2_grpc.WorkerServiceStub(channel).Execute()
        planner = Planner(None)
        planner.admit(0, list(range(1, 60)))
        with contextlib.suppress(AioRpcError):
            for step in range(400):
                plan, _ = planner.plan([(0, planner.remaining(0))])
                await call.write(plan_to_pb(plan, 7))
                await call.read()
                if step == 50:
                    group.ranks()[rank].kill()
        assert step >= 50
        await channel.close()

    settings = {"dtype": "float32", "block_size": BLOCK, "num_kv_blocks": 64, "step_timeout": 3.0, "max_num_seqs": 8}
    with running(tmp_path, folder / "small", tensor_parallel=RANKS, **settings) as group:
        asyncio.run(asyncio.wait_for(scheduler(group), 30))
        assert group.wait(20) == 1
        assert f"rank {rank} was killed by SIGKILL" in group.errors()[-1]
