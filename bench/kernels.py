"""The worker's kernels on one GPU: `python -m bench.kernels [--json FILE]`.

Each kernel alone at the shapes of decode steps of Qwen3 models, replayed as a CUDA graph of many calls
over rotating inputs; beside it the share of the ceilings that the same run measures, of copies and bfloat16 products.
"""

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.expert_cases import expert_cases
from bench.kernel_case import Call, Case
from bench.work import mixed_contexts
from worker_svc.kernels.activation import silu_and_mul
from worker_svc.kernels.candidates import SlotSampling
from worker_svc.kernels.choose import choose_tokens
from worker_svc.kernels.gumbel import gumbel_candidates
from worker_svc.kernels.norm import rms_norm
from worker_svc.kernels.paged_attention import paged_attention
from worker_svc.kernels.parts import cut_rows
from worker_svc.kernels.prepare import SlotState, TokenInputs, append_tokens, prepare_decode
from worker_svc.kernels.rope import QKNorm, rotate_and_store
from worker_svc.kernels.top_k import top_candidates
from worker_svc.layers.ops import Norm
from worker_svc.layers.triton_ops import TritonOps, prefer_cublaslt

NOT_MEASURED = (
    "Not measured: the LM head, collectives, launches from Python, how kernels overlap with those "
    "around them in a real step, prefill. Bytes are the fewest that must move; activations of a decode "
    "step fit the L2 cache, as they do in service, so that their rate may exceed the ceiling of copies. A time "
    "includes the gap to the next kernel of the graph; with PDL a kernel overlaps with its own successor."
)
VOCABULARY_SIZE = 151_936
BLOCK_SIZE = 64
MAX_LENGTH = 4096
ROTATED_BYTES = 256 << 20  # several times the L2 cache
MAX_CALLS = 32
WARM_UP, REPLAYS = 3, 25


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides its kernels' shapes."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int = 8
    head_dim: int = 128


SHAPES = (Shape("0.6B", 1024, 3072, 16), Shape("8B", 4096, 12288, 32))


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement."""

    kernel: str
    model: str
    batch: int
    context: int
    us: float
    us_pdl: float
    """With programmatic dependent launch."""
    tb_per_s: float
    share: float
    """Of the ceiling of copies."""


def main(
    batches: Annotated[str, typer.Option(help="rows")] = "1,8,64,256",
    contexts: Annotated[str, typer.Option(help="tokens that attention reads per row")] = "256,1024,4000",
    only: Annotated[str, typer.Option(help="kernels whose names hold this")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="write the points here")] = None,
) -> None:
    """Prints a table."""
    prefer_cublaslt()
    ceilings = {"copy_tb_per_s": copy_ceiling(), "matmul_tflop_per_s": matmul_ceiling()}
    cases = [
        case
        for batch in map(int, batches.split(","))
        for case in cases_of(batch, [int(context) for context in contexts.split(",")])
        if only in case.kernel
    ]
    points = [measure(case, ceilings["copy_tb_per_s"]) for case in cases]
    _print(points, ceilings)
    if json_file is not None:
        report = {"device": torch.cuda.get_device_name(), **ceilings, "points": [asdict(point) for point in points]}
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def copy_ceiling() -> float:
    """TB/s of a large elementwise operation, bytes read plus bytes written; a graph's copy nodes are slower."""
    source = torch.randn(1 << 30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return round(2 * source.nbytes / _graph_time([lambda: torch.neg(source, out=target)] * 4) / 1e12, 3)


def matmul_ceiling() -> float:
    """TFLOP/s of a large bfloat16 product of random matrices."""
    size = 8192
    a, b = (_randn(size, size) for _ in range(2))
    out = torch.empty_like(a)
    return round(2 * size**3 / _graph_time([lambda: torch.mm(a, b, out=out)] * 8) / 1e12, 1)


def measure(case: Case, ceiling: float) -> Point:
    """Median of replays, without and with programmatic dependent launch."""
    count = max(min(ROTATED_BYTES // case.bytes + 1, MAX_CALLS), 2)
    calls = [case.make() for _ in range(count)]
    plain, pdl = (_graph_time([partial(call, pdl) for call in calls]) for pdl in (False, True))
    rate = case.bytes / min(plain, pdl) / 1e12
    times = round(plain * 1e6, 2), round(pdl * 1e6, 2)
    return Point(case.kernel, case.model, case.batch, case.context, *times, round(rate, 3), round(rate / ceiling, 3))


def _graph_time(calls: list[Callable[[], object]]) -> float:
    """Seconds per call when all are captured in one CUDA graph."""
    calls[0]()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(WARM_UP):
        graph.replay()
    return statistics.median(_replay_time(graph) for _ in range(REPLAYS)) / len(calls)


def _replay_time(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def cases_of(batch: int, contexts: list[int]) -> Iterator[Case]:
    """All kernels at one batch size."""
    for shape in SHAPES:
        yield _norm(shape, batch)
        yield _rope(shape, batch)
        yield _activation(shape, batch)
        yield from _products(shape, batch)
        for context in contexts:
            yield _attention(shape, "decode attention", batch * [context])
        yield _attention(shape, "decode attention, mixed lengths", mixed_contexts(batch))
    yield from expert_cases(batch)
    for kind in ("greedy", "sample", "sample top-k"):
        yield _sampling(kind, batch)
    yield _prepare(batch)


def _norm(shape: Shape, batch: int) -> Case:
    def make() -> Call:
        x, weight = _randn(batch, shape.hidden_size), _randn(shape.hidden_size)
        out = torch.empty_like(x)
        return lambda pdl: rms_norm(x, weight, 1e-6, out=out, pdl=pdl)

    return Case("norm", shape.name, batch, 0, 2 * (2 * batch + 1) * shape.hidden_size, make)


def _products(shape: Shape, batch: int) -> Iterator[Case]:
    """A layer's products with what stands around them, as layers call them: of few rows own kernels, else cuBLASLt."""
    heads = shape.num_heads * shape.head_dim
    qkv = heads + 2 * shape.num_kv_heads * shape.head_dim
    hidden, intermediate = shape.hidden_size, shape.intermediate_size
    norm = Norm(_randn(hidden), 1e-6)

    def case(name: str, inputs: int, outputs: int, call: Callable[[TritonOps, Tensor, Tensor], object]) -> Case:
        def make() -> Call:
            x, weight = _randn(batch, inputs), _randn(outputs, inputs) * inputs**-0.5
            return lambda pdl: call(TritonOps(pdl), x, weight)

        return Case(name, shape.name, batch, 0, 2 * (inputs * outputs + batch * (inputs + outputs)), make)

    def add(ops: TritonOps, x: Tensor, weight: Tensor) -> object:
        return ops.linear_add(x, weight, residual)

    residual = _randn(batch, hidden)
    yield case("norm + qkv", hidden, qkv, lambda ops, x, weight: ops.norm_linear(x, norm, weight))
    yield case("o + residual", heads, hidden, add)
    yield case(
        "norm + gate, up + silu",
        hidden,
        2 * intermediate,
        lambda ops, x, weight: ops.norm_gated_linear(x, norm, weight),
    )
    yield case("down + residual", intermediate, hidden, add)


def _rope(shape: Shape, batch: int) -> Case:
    heads = shape.num_heads + 2 * shape.num_kv_heads

    def make() -> Call:
        qkv = _randn(batch, heads * shape.head_dim)
        table = torch.randn(MAX_LENGTH, shape.head_dim // 2, device="cuda")
        norm = QKNorm(_randn(shape.head_dim), _randn(shape.head_dim), 1e-6)
        caches = _randn(2, batch, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        positions = _ints(torch.randint(MAX_LENGTH, (batch,)))
        slots = _ints(torch.randperm(batch * BLOCK_SIZE)[:batch])
        return lambda pdl: rotate_and_store(qkv, positions, slots, table, table, norm, caches[0], caches[1], pdl=pdl)

    return Case("norm + rope + store", shape.name, batch, 0, 4 * batch * heads * shape.head_dim, make)


def _activation(shape: Shape, batch: int) -> Case:
    def make() -> Call:
        gate_up = _randn(batch, 2 * shape.intermediate_size)
        out = gate_up.new_empty(batch, shape.intermediate_size)
        return lambda pdl: silu_and_mul(gate_up, out=out, pdl=pdl)

    return Case("silu * up", shape.name, batch, 0, 6 * batch * shape.intermediate_size, make)


def _attention(shape: Shape, name: str, contexts: list[int]) -> Case:
    batch, blocks = len(contexts), -(-max(contexts) // BLOCK_SIZE)

    def make() -> Call:
        query = _randn(batch, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
        caches = _randn(2, batch * blocks, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        tables = _ints(torch.randperm(batch * blocks).view(batch, blocks))
        parts = cut_rows(_ints(torch.arange(batch)), _ints(torch.tensor(contexts)), shape.num_kv_heads)
        out = query.new_empty(batch, shape.num_heads * shape.head_dim)
        return lambda pdl: paged_attention(query, caches[0], caches[1], tables, parts, out=out, pdl=pdl)

    read_and_written = 2 * shape.num_kv_heads * sum(contexts) + 2 * batch * shape.num_heads  # heads
    return Case(name, shape.name, batch, sum(contexts) // batch, 2 * read_and_written * shape.head_dim, make)


def _sampling(kind: str, batch: int) -> Case:
    """All kernels from logits to token."""

    def make() -> Call:
        logits = 2 * _randn(batch, VOCABULARY_SIZE)
        slots = _ints(torch.arange(batch))
        narrow = kind == "sample top-k"
        sampling = _slot_sampling(batch, 0.0 if kind == "greedy" else 0.6, 20 if narrow else 0, 0.95 if narrow else 1.0)
        tokens, failed = torch.empty_like(slots), torch.empty_like(slots)

        def call(pdl: bool) -> None:
            best = gumbel_candidates(logits, slots, sampling, pdl=pdl)
            top = top_candidates(logits, slots, sampling, pdl=pdl)[None] if narrow else None
            choose_tokens(best, top, slots, sampling, tokens=tokens, failed=failed, pdl=pdl)

        return call

    return Case(kind, "both", batch, 0, 2 * batch * VOCABULARY_SIZE, make)


def _prepare(batch: int) -> Case:
    def make() -> Call:
        slots = _ints(torch.arange(batch))
        tables = _ints(torch.randint(1000, (batch, MAX_LENGTH // BLOCK_SIZE)))
        state = SlotState(_ints(torch.randint(1, 1000, (batch,))), _ints(torch.randint(1000, (batch,))), tables)
        out = TokenInputs(*(torch.empty_like(slots) for _ in range(3)))
        seq_lens = torch.empty_like(slots)

        def call(pdl: bool) -> None:
            prepare_decode(slots, state, BLOCK_SIZE, out=out, seq_lens=seq_lens, pdl=pdl)
            cut_rows(slots, state.lengths, SHAPES[0].num_kv_heads, pdl=pdl)
            append_tokens(slots, out.token_ids, state, pdl=pdl)

        return call

    return Case("prepare, cut, append", "both", batch, 0, 48 * batch, make)


def _slot_sampling(slots: int, temperature: float, top_k: int, top_p: float) -> SlotSampling:
    def column(value: float) -> Tensor:
        return torch.full((slots,), value, device="cuda")

    return SlotSampling(
        temperature=column(temperature),
        top_k=column(top_k).int(),
        top_p=column(top_p),
        min_p=column(0),
        seeds=torch.arange(slots, device="cuda"),
        positions=column(100).int(),
        suppressed_ids=torch.full((slots, 8), -1, dtype=torch.int32, device="cuda"),
        suppressed_until=column(0).int(),
    )


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def _ints(values: Tensor) -> Tensor:
    return values.int().cuda()


def _print(points: list[Point], ceilings: dict[str, float]) -> None:
    table = Table(title=f"Kernels on {torch.cuda.get_device_name()}; ceilings {ceilings}")
    names = list(Point.__dataclass_fields__)
    for name in names:
        table.add_column(name, justify="left" if name in ("kernel", "model") else "right")
    for point in points:
        table.add_row(*(str(value) for value in asdict(point).values()))
    console = Console(width=110)
    console.print(table)
    console.print(NOT_MEASURED)


if __name__ == "__main__":
    typer.run(main)
