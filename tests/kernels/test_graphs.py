"""A chain of kernels replayed as a CUDA graph with programmatic dependent launch gives what single launches give."""

import pytest
import torch
from torch import Tensor

from tests.kernels import COMPILED, DEVICE, ints, poisoned, randn
from worker_svc.kernels.candidates import SlotSampling
from worker_svc.kernels.choose import choose_tokens
from worker_svc.kernels.fused_linear import fused_linear
from worker_svc.kernels.gumbel import gumbel_candidates
from worker_svc.kernels.norm import rms_norm
from worker_svc.kernels.paged_attention import paged_attention
from worker_svc.kernels.parts import cut_rows
from worker_svc.kernels.top_k import top_candidates

ROWS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 8, 1024, 8, 2, 64


class Chain:
    """Each kernel reads what the one before wrote."""

    def __init__(self) -> None:
        bfloat16 = torch.bfloat16
        self.x = randn(ROWS, HIDDEN, dtype=bfloat16)
        self.residual = randn(ROWS, HIDDEN, dtype=bfloat16, seed=1)
        self.weight = randn(HIDDEN, dtype=bfloat16, seed=2)
        width = HEADS * HEAD_DIM
        self.gate_up = (randn(2 * width, HIDDEN, seed=6) * HIDDEN**-0.5).to(bfloat16)
        self.back = (randn(HIDDEN, width, seed=7) * width**-0.5).to(bfloat16)
        self.caches = [randn(4 * ROWS, 64, KV_HEADS, HEAD_DIM, dtype=bfloat16, seed=seed) for seed in (3, 4)]
        self.tables = torch.arange(4 * ROWS, dtype=torch.int32, device=DEVICE).view(ROWS, 4)
        self.rows = ints(list(range(ROWS)))
        self.lengths = ints([1, 250, 30, 64, 65, 100, 200, 7])
        self.sampling = SlotSampling(
            temperature=torch.ones(ROWS, device=DEVICE),
            top_k=ints([0, 20] * (ROWS // 2)),
            top_p=torch.ones(ROWS, device=DEVICE),
            min_p=torch.zeros(ROWS, device=DEVICE),
            seeds=torch.arange(ROWS, device=DEVICE),
            positions=self.lengths,
            suppressed_ids=ints([[-1]] * ROWS),
            suppressed_until=ints([0] * ROWS),
        )
        self.residual_out = torch.empty_like(self.residual)
        self.normed = poisoned(ROWS, HIDDEN, dtype=bfloat16)
        self.attended = poisoned(ROWS, HEADS * HEAD_DIM, dtype=bfloat16)
        self.logits = poisoned(ROWS, HEADS * HEAD_DIM, dtype=bfloat16)
        self.tokens, self.failed = (poisoned(ROWS, dtype=torch.int32) for _ in range(2))

    def run(self, pdl: bool) -> None:
        parts = cut_rows(self.rows, self.lengths, KV_HEADS, pdl=pdl)
        self.residual_out.copy_(self.residual)
        rms_norm(self.x, self.weight, 1e-6, out=self.normed, pdl=pdl)
        norm = {"norm_weight": self.weight, "eps": 1e-6}
        self.hidden = fused_linear(self.normed, self.gate_up, gated=True, **norm, pdl=pdl)
        paged_attention(self.hidden, *self.caches, self.tables, parts, out=self.attended, pdl=pdl)
        fused_linear(self.attended, self.back, residual=self.residual_out, pdl=pdl)
        rms_norm(self.attended, self.weight[: HEADS * HEAD_DIM], 1e-6, out=self.logits, pdl=pdl)
        best = gumbel_candidates(self.logits, self.rows, self.sampling, pdl=pdl)
        top = top_candidates(self.logits, self.rows, self.sampling, pdl=pdl)
        choose_tokens(best, top[None], self.rows, self.sampling, tokens=self.tokens, failed=self.failed, pdl=pdl)

    def results(self) -> list[Tensor]:
        return [self.residual_out, self.normed, self.hidden, self.attended, self.logits, self.tokens, self.failed]


@pytest.mark.skipif(not COMPILED, reason="graphs need a GPU")
def test_a_graph_with_dependent_launches() -> None:
    chain = Chain()
    chain.run(pdl=False)
    expected = [result.clone() for result in chain.results()]
    assert not expected[-1].any()
    chain.run(pdl=True)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.run(pdl=True)
    for _ in range(10):
        for result in chain.results():
            result.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(*pair) for pair in zip(chain.results(), expected, strict=True))


def test_the_chain_runs() -> None:
    chain = Chain()
    chain.run(pdl=False)
    assert not chain.failed.any()
    assert all(result.float().isfinite().all() for result in chain.results())
