"""Compiles the kernels of a model's layers for compute capability 9.0, without a GPU: what the interpreter lets pass
may not compile. `python -m tests.kernels.compile_layers`, without TRITON_INTERPRET, prints the names of those that did.
"""

from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from worker_svc.kernels.paged_attention import paged_attention
from worker_svc.kernels.parts import cut_rows
from worker_svc.layers.kv_cache import LayerCache
from worker_svc.layers.ops import ExpertWeights, Norm, QKNorm, Routing
from worker_svc.layers.triton_ops import TritonOps

HIDDEN, WIDTH, EXPERTS, TOP_K = 2048, 768, 128, 8
HEADS, KV_HEADS, HEAD_DIM = 32, 4, 128
ROWS = (1, 8, 32, 64, 300)
"""One token, few, and each way of products of more."""


class _Hopper:
    """What Triton asks of a device to compile for it."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    """Runs each operation of layers.ops; a launch ends when its kernel is compiled."""
    driver.set_active(_Hopper())
    launch, seen = JITFunction.run, set[str]()

    def compile_only(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        compiled = launch(kernel, *args, warmup=True, **options)
        seen.add(kernel.fn.__name__)
        return compiled

    JITFunction.run = compile_only
    for rows in ROWS:
        _layer(TritonOps(pdl=True), rows)
    print(*sorted(seen))


def _layer(ops: TritonOps, rows: int) -> None:
    x, norm = _some(rows, HIDDEN), Norm(_some(HIDDEN), 1e-6)
    slots = torch.zeros(rows, dtype=torch.int64)
    cache = LayerCache(_some(9, 64, KV_HEADS, HEAD_DIM), _some(9, 64, KV_HEADS, HEAD_DIM))
    tables = torch.zeros(99, HEAD_DIM // 2), torch.zeros(99, HEAD_DIM // 2)
    qkv = ops.norm_linear(x, norm, _some((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN))
    head_norm = QKNorm(_some(HEAD_DIM), _some(HEAD_DIM), 1e-6)
    ops.rotate_and_store(qkv, head_norm, ops.rotation(*tables, slots), slots, cache)
    lengths = torch.zeros(rows, dtype=torch.int32)
    out = _some(rows, HEADS * HEAD_DIM)
    parts = cut_rows(lengths, lengths, KV_HEADS, pdl=True)
    paged_attention(qkv, cache.key, cache.value, lengths[:, None], parts, out=out, pdl=True)
    ops.linear_add(out, _some(HIDDEN, HEADS * HEAD_DIM), x)
    experts = ExpertWeights(_some(EXPERTS, 2 * WIDTH, HIDDEN), _some(EXPERTS, HIDDEN, WIDTH), 0)
    ops.norm_experts_add(x, norm, Routing(_some(EXPERTS, HIDDEN), TOP_K, True), experts, slots, x)
    ops.norm_gated_linear(x, norm, _some(2 * WIDTH, HIDDEN))


def _some(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)  # never read: a layer's experts are a gigabyte


if __name__ == "__main__":
    main()
