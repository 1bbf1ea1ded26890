"""Exchanges between real processes, in the interpreter; between GPUs: tests/gpu/test_gpu_parallel.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels import COMPILED
from tests.kernels.exchange_rank import CASES, EPS, ROWS, WIDTH, norm_weight, values_of
from tests.patience import PATIENCE_S
from worker_svc.kernels import exchange_rows


@pytest.mark.skipif(COMPILED, reason="compiled kernels can't map files")
def test_exchanges_of_changing_size(tmp_path: Path) -> None:
    ranks = 3
    for rank in range(ranks):
        words = exchange_rows.inbox_words(ranks, ROWS * exchange_rows.MOST_WORDS.value)
        inbox = torch.from_file(str(tmp_path / f"rows{rank}"), shared=True, size=words, dtype=torch.int32)
        inbox.fill_(exchange_rows.NOTHING.value)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.exchange_rank"]
    processes = [
        subprocess.Popen([*command, str(rank), str(ranks), str(tmp_path)], env=environment) for rank in range(ranks)
    ]
    try:
        assert [process.wait(PATIENCE_S) for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
    loaded = [torch.load(tmp_path / f"results{rank}") for rank in range(ranks)]
    results = [sums for sums, _ in loaded]
    for case, (kind, dtype, _) in enumerate(CASES):
        brought = torch.stack([values_of(rank, case) for rank in range(ranks)])
        expected = brought if kind == "gather" else brought.double().sum(0)
        for rank in range(ranks):
            assert torch.equal(results[rank][case], results[0][case]), "the ranks disagree"
            assert results[rank][case].dtype == dtype
        bound = {torch.bfloat16: 2**-7, torch.float32: 1e-6, torch.int64: 0}[dtype]  # the interpreter cuts bits off
        torch.testing.assert_close(results[0][case].to(expected.dtype), expected, rtol=bound, atol=bound)
        if kind == "normed rows":
            total, weight = results[0][case].view(-1, WIDTH).double(), norm_weight(dtype).double()
            norms = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * weight
            for rank in range(ranks):
                torch.testing.assert_close(loaded[rank][1][case].double(), norms.flatten(), rtol=2 * bound, atol=bound)
