"""Sampled tokens are the best by the noise that layers.noise defines, among those that layers.filters keeps."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels import COMPILED, DEVICE, DTYPES, ints, poisoned, randn
from worker_svc.kernels.candidates import SlotSampling
from worker_svc.kernels.choose import choose_tokens
from worker_svc.kernels.gumbel import gumbel_candidates
from worker_svc.kernels.top_k import top_candidates
from worker_svc.layers.filters import filter_logits
from worker_svc.layers.noise import exponential, row_keys, torch_noise_bits

VOCABULARIES = [50, 1000, 5000] + [151_936] * COMPILED


def slot_sampling(rows: int, **given: Any) -> SlotSampling:
    """Slot s has the parameters of row s; rows of one kind unless lists are given."""

    def column(name: str, default: float, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(given.get(name, default), dtype=dtype).expand(rows).contiguous().to(DEVICE)

    return SlotSampling(
        temperature=column("temperature", 1, torch.float32),
        top_k=column("top_k", 0, torch.int32),
        top_p=column("top_p", 1, torch.float32),
        min_p=column("min_p", 0, torch.float32),
        seeds=torch.arange(rows, device=DEVICE) * 1_000_003 - 5,
        positions=ints([17 + 3 * row for row in range(rows)]),
        suppressed_ids=ints(given.get("suppressed_ids", [[-1, -1]] * rows)),
        suppressed_until=column("suppressed_until", 0, torch.int32),
    )


def sample(
    logits: Tensor, sampling: SlotSampling, slots: list[int] | None = None, shards: int = 1
) -> tuple[list[int], list[int]]:
    """Tokens and failures. Each shard stands for a rank."""
    rows = ints(list(range(len(logits))) if slots is None else slots)
    tokens, failed = (poisoned(len(logits), dtype=torch.int32) for _ in range(2))
    size = -(-logits.shape[1] // shards)
    parts = [(logits[:, start : start + size], start) for start in range(0, logits.shape[1], size)]
    best = torch.cat([gumbel_candidates(part, rows, sampling, first_token=start) for part, start in parts])
    top = torch.stack([top_candidates(part, rows, sampling, first_token=start) for part, start in parts])
    choose_tokens(best, top, rows, sampling, tokens=tokens, failed=failed)
    return tokens.tolist(), failed.tolist()


def scores(logits: Tensor, sampling: SlotSampling) -> Tensor:
    """[N, V] float64: what a row takes the argmax of."""
    logits = logits.double().cpu() / sampling.temperature.double().cpu()[:, None]
    top_k, top_p, min_p = (x.cpu() for x in (sampling.top_k.long(), sampling.top_p, sampling.min_p))
    kept = filter_logits(logits, top_k, top_p, min_p, logits.shape[1])
    keys = row_keys(sampling.seeds.cpu().numpy().view(np.uint64), sampling.positions.cpu().numpy().astype(np.int64))
    return kept - exponential(torch_noise_bits(keys, 0, logits.shape[1]), torch.float64).log()


def assert_best(tokens: list[int], scores: Tensor) -> None:
    """Up to the rounding of scores in float32."""
    chosen = scores.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    best = scores.max(-1).values
    assert (chosen >= best - 1e-4 - 1e-6 * best.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_plain_rows(vocabulary: int, dtype: torch.dtype) -> None:
    logits = 2 * randn(6, vocabulary, dtype=dtype)
    sampling = slot_sampling(6, temperature=[0.3, 0.6, 1.0, 1.5, 3.0, 1e-3])
    tokens, failed = sample(logits, sampling)
    assert_best(tokens, scores(logits, sampling))
    assert failed == [0] * 6


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_greedy_rows(vocabulary: int) -> None:
    """Exactly the argmax, filters or not; of equal logits the lowest token, zeros of either sign being equal."""
    logits = randn(4, vocabulary, dtype=torch.bfloat16).clamp(max=0)
    logits[0, [7, 20]] = 9
    logits[1, :] = 1
    logits[2, :] = 0
    logits[2, :10] = -0.0
    tokens, failed = sample(logits, slot_sampling(4, temperature=0, top_k=[0, 5, 0, 20]))
    assert tokens == [7, 0, 0, int((logits[3] == logits[3].max()).nonzero()[0])]
    assert failed == [0] * 4


FILTERS = [
    {"top_k": [1, 2, 20, 33, 63, 64]},
    {"top_k": 20, "top_p": [0.01, 0.5, 0.8, 0.95, 0.999, 1.0]},
    {"top_k": 64, "min_p": [0.01, 0.1, 0.3, 0.5, 0.9, 1.0]},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.05, "temperature": [0.1, 0.6, 0.7, 1.0, 1.3, 5.0]},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", FILTERS, ids=lambda given: " ".join(given))
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_filtered_rows(vocabulary: int, given: dict[str, Any], dtype: torch.dtype) -> None:
    logits = 2 * randn(6, vocabulary, dtype=dtype, seed=vocabulary)
    sampling = slot_sampling(6, **given)
    tokens, failed = sample(logits, sampling)
    assert_best(tokens, scores(logits, sampling))
    assert failed == [0] * 6


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_64_best_wherever_they_lie(vocabulary: int, dtype: torch.dtype) -> None:
    """Rising, falling, all equal, many equal, all in the middle; of equal ones the lower tokens."""
    ramp = torch.arange(vocabulary).float()
    logits = torch.stack((ramp, -ramp, torch.zeros(vocabulary), ramp // 7 % 5, -(ramp - vocabulary // 2).abs())).to(
        dtype
    )
    top = top_candidates(logits.to(DEVICE), ints(range(5)), slot_sampling(5, top_k=64))
    tokens = 0x7FFFFFFF - (top.cpu() & 0x7FFFFFFF)
    expected = logits.sort(dim=-1, descending=True, stable=True).indices[:, :64].sort(dim=-1).values
    assert tokens[:, : expected.shape[1]].tolist() == expected.tolist()


@pytest.mark.parametrize("shards", [2, 3])
def test_ranks_choose_as_one(shards: int) -> None:
    logits = 2 * randn(6, 3000)
    sampling = slot_sampling(6, top_k=[0, 20, 64, 0, 5, 1], temperature=[1, 1, 1, 0, 0.7, 1])
    assert sample(logits, sampling, shards=shards) == sample(logits, sampling)


def test_padding_rows_and_slots() -> None:
    """A row samples by its slot's parameters wherever it stands; rows without a slot or with filters of others' yield
    token 0."""
    logits = 2 * randn(3, 1000)
    sampling = slot_sampling(5, top_k=[0, 0, 20, 100, 0], top_p=[1, 1, 0.9, 1, 0.5], temperature=[1, 0.5, 2, 1, 1])
    alone = [
        sample(logits[:1].expand(5, -1).contiguous(), sampling)[0][slot] for slot in range(3)
    ]  # row s samples for slot s
    assert sample(logits[[0, 0, 0]], sampling, [2, -1, 0]) == ([alone[2], 0, alone[0]], [0, 0, 0])
    assert sample(logits, sampling, [3, 4, -1]) == ([0, 0, 0], [0, 0, 0])


@pytest.mark.parametrize("kind", [{}, {"temperature": 0}, {"top_k": 20}], ids=["sampled", "greedy", "filtered"])
def test_rows_without_a_finite_maximum_fail_alone(kind: dict[str, Any]) -> None:
    logits = randn(5, 2000)
    logits[0, 1500] = torch.nan
    logits[1] = -torch.inf
    logits[2, 3] = torch.inf
    logits[3, :1999] = -torch.inf
    tokens, failed = sample(logits, slot_sampling(5, **kind))
    assert failed == [1, 1, 1, 0, 0]
    assert tokens[:4] == [0, 0, 0, 1999]


@pytest.mark.parametrize("kind", [{}, {"temperature": 0}, {"top_k": 2}], ids=["sampled", "greedy", "filtered"])
@pytest.mark.parametrize("shards", [1, 2])
def test_suppressed_tokens(kind: dict[str, Any], shards: int) -> None:
    """Rows 0 and 1 are before and at the position from which token 900 is free again."""
    logits = torch.zeros(2, 1000, device=DEVICE)
    logits[:, [900, 30]] = torch.tensor([90.0, 60.0], device=DEVICE)
    sampling = slot_sampling(2, suppressed_ids=[[900, -1]] * 2, suppressed_until=[18, 20], **kind)
    assert sample(logits, sampling, shards=shards)[0] == [30, 900]
