"""One rank of a group on GPUs: `python -m tests.gpu.parallel_rank RANK SIZE FOLDER`.

What it computed goes into a file of its own in the folder, which holds the models `small`, `replicated`, `experts` and
`large`.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shared.model_config import load_model_config
from shared.types import RowSampling
from tests.worker.model_folder import VOCABULARY
from tests.worker.planner import BLOCK, GREEDY, Planner
from worker_svc.config import WorkerConfig
from worker_svc.parallel import TensorParallel, join
from worker_svc.runner.build import build_runner

KINDS = (
    GREEDY,
    RowSampling(temperature=1.3, seed=(7 << 32) + 1),
    RowSampling(temperature=1.5, top_k=40, top_p=0.95, seed=5),
    RowSampling(temperature=1.2, top_p=0.9, seed=6),
)
PROMPT = np.random.default_rng(0).integers(0, 150_000, 200).tolist()
SUMS = ((1, 8), (1, 4096), (5, 4096), (16, 4096), (17, 4096), (700, 1000), (5000, 4096))
"""Of all-reduces in bfloat16: few values, from the fifth on by rows, the last in two parts."""


def make_planner(folder: Path, group: TensorParallel, **settings: Any) -> Planner:
    """A runner on this rank's GPU, with small pools."""
    values = {
        "dtype": "float32",
        "block_size": BLOCK,
        "num_kv_blocks": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "max_model_len": 512,
        "tensor_parallel": group.size,
        **settings,
    }
    config = WorkerConfig(str(folder), **values)
    planner = Planner(build_runner(config, load_model_config(folder), group, torch.device("cuda", group.rank)))
    planner.open()
    return planner


def tokens(folder: Path, group: TensorParallel, **settings: Any) -> list[list[int]]:
    """Sequences of all kinds, prompts in chunks beside decode rows, then decode rows alone."""
    planner = make_planner(folder, group, **settings)
    for slot in range(8):
        prompt = np.random.default_rng(slot).integers(0, VOCABULARY, 11 + 7 * slot).tolist()
        planner.admit(slot, prompt, KINDS[slot % len(KINDS)])
        planner.step([(other, min(9, planner.remaining(other))) for other in range(slot + 1)])
    for _ in range(24):
        planner.step([(slot, min(9, planner.remaining(slot))) for slot in range(8)])
    return [planner.sequences[slot].tokens for slot in range(8)]


def logits(folder: Path, group: TensorParallel) -> Tensor:
    """[8, tokens of this rank]: after a mixed step, then after decode steps that are fed what the prompt says."""
    planner = make_planner(folder, group, dtype="bfloat16", max_num_seqs=8)
    rows = []
    planner.admit(0, PROMPT[:192])
    for position in range(191, 199):
        planner.runner._state.slots.last_tokens[0] = PROMPT[position]
        plan, _ = planner.plan([(0, planner.remaining(0))])
        planner.runner.step(plan).to_host()
        rows.append(planner.runner._kernels.logits[0].float().cpu())
    return torch.stack(rows)


def brought(rank: int, shape: tuple[int, int]) -> Tensor:
    """What a rank adds to a sum, zeros of either sign too."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(10 * shape[0] + rank)).bfloat16()
    values[:, ::5] = -0.0
    values[:, 1::10] = -0.0
    return values


def sums(group: TensorParallel) -> dict[str, list[Tensor]]:
    """Of all shapes: as the group does it, captured and replayed while the ranks run apart, and by NCCL alone."""
    inputs = [brought(group.rank, shape).cuda() for shape in SUMS]
    work = [values.clone() for values in inputs]
    eager = [group.all_reduce(values.clone()) for values in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for values, given in zip(work, inputs, strict=True):
            group.all_reduce(values.copy_(given))
    for turn in range(40):
        torch.cuda._sleep(50_000 * ((turn + group.rank) % 3))
        graph.replay()
    for values in inputs:
        dist.all_reduce(values)
    torch.cuda.synchronize()
    return {"eager": _host(eager), "replayed": _host(work), "nccl": _host(inputs)}


def gathers(group: TensorParallel) -> list[Tensor]:
    """Of few and of many int64, on either way."""
    counts = (3, 512, 1 << 16, (1 << 16) + 1)
    return _host([group.all_gather(torch.arange(count).cuda() * (group.rank + 1) - (1 << 40)) for count in counts])


def _host(values: list[Tensor]) -> list[Tensor]:
    return [value.cpu() for value in values]


def main() -> None:
    """All of it, in one group."""
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = join(rank, size, folder / "rendezvous", device)
    results: dict[str, Any] = {
        "direct": group.peers is not None,
        "sums": sums(group),
        "gathers": gathers(group),
        "small": tokens(folder / "small", group),
        "small, eager": tokens(folder / "small", group, enforce_eager=True),
        "replicated": tokens(folder / "replicated", group),
        "experts": tokens(folder / "experts", group),
        "whole experts": tokens(folder / "experts", group, expert_parallel=True),
        "logits": logits(folder / "large", group),
    }
    torch.save(results, folder / f"results{rank}")
    group.leave()
    os._exit(0)


if __name__ == "__main__":
    main()
