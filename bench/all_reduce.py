"""All-reduce between GPUs, in CUDA graphs: `python -m bench.all_reduce [--json FILE]`.

The worker's own way beside torch's symmetric memory and NCCL. Every rank is a process of its own.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, NoReturn

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed import _symmetric_memory

from bench.ranks import run_ranks
from shared.process import die_with_parent
from worker_svc.parallel import TensorParallel, join

WIDTH = 4096  # of a row, bfloat16: Qwen3-8B's
ROWS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_CALLS = 20
_REPLAYS = 15


@dataclass(frozen=True, slots=True)
class Point:
    """Microseconds of one all-reduce; None: not that many."""

    rows: int
    bytes: int
    own_us: float | None
    own_with_norm_us: float | None
    one_shot_us: float
    two_shot_us: float
    nccl_us: float


def main(
    ranks: Annotated[int, typer.Option(help="GPUs")] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the points here")] = None,
) -> None:
    """Prints a table."""
    with TemporaryDirectory() as scratch:
        run_ranks("bench.all_reduce", ranks, [str(ranks), scratch])
        points = [Point(**values) for values in json.loads((Path(scratch) / "points").read_text(encoding="utf-8"))]
    table = Table(title=f"all-reduce over {ranks} GPUs, bfloat16, microseconds")
    for name in Point.__dataclass_fields__:
        table.add_column(name.replace("_", " "), justify="right")
    for point in points:
        table.add_row(*("" if value is None else f"{value:,}" for value in asdict(point).values()))
    Console(width=100).print(table)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(point) for point in points], indent=2) + "\n", encoding="utf-8")


def rank_main(rank: int, size: int, folder: Path) -> NoReturn:
    """Rank 0 writes the points."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = join(rank, size, folder / "rendezvous", device)
    shared = _symmetric_memory.empty(max(ROWS) * WIDTH, dtype=torch.bfloat16, device=device)
    assert dist.group.WORLD is not None
    _symmetric_memory.rendezvous(shared, dist.group.WORLD)
    points = [_point(group, shared, rows) for rows in ROWS]
    if rank == 0:
        (folder / "points").write_text(json.dumps([asdict(point) for point in points]), encoding="utf-8")
    group.leave()
    os._exit(0)  # as worker_svc.main does


def _point(group: TensorParallel, shared: Tensor, rows: int) -> Point:
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    values, mapped = torch.randn(rows, WIDTH, device=shared.device).bfloat16(), shared[: rows * WIDTH]
    peers, weight = group.peers, torch.ones(WIDTH, device=shared.device).bfloat16()
    own = own_with_norm = None
    if peers is not None and peers.can_add(values):
        own = _time(lambda: peers.all_reduce(values))
        own_with_norm = _time(lambda: peers.all_reduce_norm(values, weight, 1e-6))
    return Point(
        rows=rows,
        bytes=values.nbytes,
        own_us=own,
        own_with_norm_us=own_with_norm,
        one_shot_us=_time(lambda: torch.ops.symm_mem.one_shot_all_reduce(mapped, "sum", name)),
        two_shot_us=_time(lambda: torch.ops.symm_mem.two_shot_all_reduce_(mapped, "sum", name)),
        nccl_us=_time(lambda: dist.all_reduce(values)),
    )


def _time(call: Callable[[], object]) -> float:
    """Median over replays of a graph of several calls, per call. The ranks' GPUs wait for each other inside."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            call()
    times: list[float] = []
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / _CALLS)
    return round(sorted(times)[len(times) // 2], 2)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].isdigit():
        die_with_parent()
        rank_main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    else:
        typer.run(main)
