"""Sampling draws from the distribution that the parameters describe; filters keep what a naive sort keeps."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker_svc.layers.filters import filter_logits
from worker_svc.layers.sampler import SampledTokens, Sampler
from worker_svc.parallel import TensorParallel
from worker_svc.step_inputs import SamplingInputs

P = [0.05, 0.4, 0.15, 0.25, 0.1, 0.03, 0.02]


def inputs(rows: int, **given: Any) -> SamplingInputs:
    """Rows of one kind unless arrays are given."""

    def column(name: str, default: float, dtype: Any) -> Any:
        return np.broadcast_to(np.asarray(given.get(name, default), dtype=dtype), rows).copy()

    return SamplingInputs(
        slots=np.arange(rows),
        last_index=np.arange(rows),
        positions=column("positions", 0, np.int64),
        temperature=column("temperature", 1, np.float32),
        top_k=column("top_k", 0, np.int64),
        top_p=column("top_p", 1, np.float32),
        min_p=column("min_p", 0, np.float32),
        seeds=column("seeds", 0, np.uint64),
        suppressed=np.zeros((0, 2), dtype=np.int32),
        masks=(),
        ruled=np.zeros(rows, dtype=bool),
        logprobs=np.full(rows, -1),
    )


def sample(logits: torch.Tensor, given: SamplingInputs) -> SampledTokens:
    return Sampler(TensorParallel(), 0, logits.shape[1])(logits.clone(), given)


def logits_of(p: list[float], rows: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(p, dtype=dtype).log().repeat(rows, 1)


def chi_square_excess(tokens: torch.Tensor, p: list[float]) -> float:
    """In standard deviations above its mean."""
    counts = np.bincount(tokens.numpy(), minlength=len(p))
    expected = np.array(p) * len(tokens)
    degrees = sum(value > 0 for value in p) - 1
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum())
    return (chi_square - degrees) / (2 * degrees) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("key", ["seeds", "positions"])
@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, P),
        ({"temperature": 0.5}, (np.array(P) ** 2 / (np.array(P) ** 2).sum()).tolist()),
        ({"top_k": 2}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0, 0, 0]),
        ({"top_p": 0.6}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0, 0, 0]),
        ({"min_p": 0.2}, [0, 0.4 / 0.9, 0.15 / 0.9, 0.25 / 0.9, 0.1 / 0.9, 0, 0]),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "min_p"],
)
def test_distribution(key: str, parameters: dict[str, float], expected: list[float], dtype: torch.dtype) -> None:
    """Over consecutive seeds at one position, and over consecutive positions of one seed."""
    rows = 20_000
    given = inputs(rows, **parameters, **{key: np.arange(rows)})
    assert abs(chi_square_excess(sample(logits_of(P, rows, dtype), given).token_ids, expected)) < 5


def test_a_hopeless_token_is_never_sampled() -> None:
    """Uniform numbers that round to 1 would give it infinite noise once in a while."""
    rows, width = 2_000, 1_000
    logits = torch.zeros(rows, width)
    logits[:, ::2] = -60.0
    tokens = sample(logits, inputs(rows, seeds=np.arange(rows))).token_ids
    assert (tokens % 2 == 1).all()


def test_greedy_takes_the_lowest_of_equal_tokens_beside_sampled_rows() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]]).repeat(200, 1)
    temperature = np.where(np.arange(200) % 2, 1.0, 0.0)
    tokens = sample(logits, inputs(200, temperature=temperature, seeds=np.arange(200))).token_ids
    assert (tokens[::2] == 1).all()
    assert len(set(tokens[1::2].tolist())) > 1


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-4])
def test_tiny_temperatures_take_the_most_likely_token(temperature: float) -> None:
    logits = torch.tensor([[-1e4, 9e3, 1e4, 0.0]]).repeat(50, 1)
    given = inputs(50, temperature=temperature, seeds=np.arange(50))
    sampled = sample(logits, given)
    assert (sampled.token_ids == 2).all() and not sampled.failed.any()


@pytest.mark.parametrize("parameters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"temperature": 0.0}])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_without_a_finite_maximum_fail_alone(value: float, parameters: dict[str, float]) -> None:
    logits = logits_of(P, 3)
    logits[1] = value
    sampled = sample(logits, inputs(3, **parameters))
    assert sampled.failed.tolist() == [False, True, False]
    assert sampled.token_ids[1] == 0
    assert sampled.token_ids[0] == sampled.token_ids[2]


def test_a_row_does_not_depend_on_its_batch() -> None:
    """Seeded beside unseeded, filtered beside plain and greedy: each row is as if alone."""
    rng = np.random.default_rng(0)
    rows = 64
    logits = torch.from_numpy(rng.normal(0, 3, (rows, 500)).round(1))  # with many equal values
    columns = {
        "temperature": rng.choice([0.0, 0.7, 1.3], rows),
        "top_k": rng.choice([0, 1, 5, 50, 5000], rows),
        "top_p": rng.choice([1.0, 0.9, 0.3], rows),
        "min_p": rng.choice([0.0, 0.05], rows),
        "seeds": rng.integers(0, 2**63, rows),
        "positions": rng.integers(0, 1000, rows),
    }
    together = sample(logits, inputs(rows, **columns)).token_ids.tolist()
    alone = [
        int(sample(logits[row : row + 1], inputs(1, **{k: v[row] for k, v in columns.items()})).token_ids)
        for row in range(rows)
    ]
    assert together == alone


def naive_filter(p: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Sort, cut at k, renormalise, keep through the token that crosses top_p, then drop what is below min_p."""
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    order = order[:top_k] if top_k else order
    total = sum(p[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        if mass >= top_p and kept:
            break
        kept.append(token)
        mass += p[token] / total
    return {token for token in kept if p[token] >= min_p * p[order[0]]}


def kept(p: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    one = [torch.tensor([value]) for value in (top_k, top_p, min_p)]
    filtered = filter_logits(
        logits_of(p), *(x.double() if x.is_floating_point() else x for x in one), most=top_k or len(p)
    )
    return set(filtered[0].isfinite().nonzero()[:, 0].tolist())


# Weights and cuts are such that no sum and no ratio lies on a cut: there, rounding decides.
weights = st.lists(st.sampled_from([1, 1, 2, 3, 5, 8, 16]), min_size=1, max_size=12)


@given(
    weights,
    st.integers(0, 14),
    st.sampled_from([0.1234567, 0.3456789, 0.7654321, 0.9876543, 1.0]),
    st.sampled_from([0.0, 0.1234567, 0.4321098]),
)
def test_filters_keep_what_a_sort_keeps(weights: list[int], top_k: int, top_p: float, min_p: float) -> None:
    p = [weight / sum(weights) for weight in weights]
    assert kept(p, top_k, top_p, min_p) == naive_filter(p, top_k, top_p, min_p)


@pytest.mark.parametrize(
    ("p", "top_k", "top_p", "min_p", "expected"),
    [
        ([0.1, 0.2, 0.3, 0.4], 0, 0.6, 0.0, {2, 3}),
        ([0.1, 0.2, 0.3, 0.4], 0, 1e-9, 0.0, {3}),
        ([0.1, 0.2, 0.3, 0.4], 0, 1.0, 1.0, {3}),
        ([0.25, 0.25, 0.25, 0.25], 2, 1.0, 0.0, {0, 1}),
        ([0.25, 0.25, 0.25, 0.25], 0, 0.4, 0.0, {0, 1}),
        ([0.1, 0.2, 0.3, 0.4], 2, 0.5, 0.0, {3}),
        ([0.1, 0.2, 0.3, 0.4], 9, 1.0, 0.0, {0, 1, 2, 3}),
    ],
)
def test_named_cases(p: list[float], top_k: int, top_p: float, min_p: float, expected: set[int]) -> None:
    """The token that crosses top_p is kept, at least one survives, equal tokens go by index, top_p counts within k."""
    assert kept(p, top_k, top_p, min_p) == expected
