"""Decode attention equals softmax attention in float64, whatever the lengths, blocks and splits are."""

import pytest
import torch
from torch import Tensor

from tests.kernels import COMPILED, DEVICE, DTYPES, assert_close, ints, poisoned, randn
from worker_svc.kernels.paged_attention import num_splits, paged_attention


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[num_heads, head_dim] over [length, num_kv_heads, head_dim], in float64."""
    query, key, value = (x.double().cpu() for x in (query, key, value))
    shared = len(query) // key.shape[1]
    key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
    weights = (torch.einsum("hd,lhd->hl", query, key) / query.shape[1] ** 0.5).softmax(-1)
    return torch.einsum("hl,lhd->hd", weights, value)


def check(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, block_size: int, splits: int, dtype: torch.dtype
) -> None:
    """Blocks in random order; what lies beyond a row's end and in blocks of nobody is NaN."""
    rows = len(lengths)
    width = -(-max(lengths) // block_size)
    order = torch.randperm(rows * width + 1, generator=torch.Generator().manual_seed(1))
    tables = order[: rows * width].view(rows, width)
    caches = [poisoned(rows * width + 1, block_size, kv_heads, head_dim, dtype=dtype) for _ in range(2)]
    contexts = []
    for row, length in enumerate(lengths):
        parts = []
        for seed, cache in enumerate(caches):
            part = randn(length, kv_heads, head_dim, dtype=dtype, seed=10 * row + seed)
            token = torch.arange(length)
            cache[tables[row][token // block_size].to(DEVICE), (token % block_size).to(DEVICE)] = part
            parts.append(part)
        contexts.append(parts)
    packed = randn(rows, heads + 2, head_dim, dtype=dtype, seed=5)  # the heads after the queries are not read
    table_rows = torch.arange(rows).flip(0)  # row r has its table at another place
    out = poisoned(rows, heads * head_dim, dtype=dtype)
    paged_attention(
        packed.flatten(1),
        caches[0],
        caches[1],
        ints(tables.flip(0).tolist()),
        ints([row if length else -1 for row, length in zip(table_rows.tolist(), lengths, strict=True)]),
        ints(lengths),
        out=out,
        splits=splits,
    )
    for row, (key, value) in enumerate(contexts):
        if lengths[row]:
            assert_close(out[row].view(heads, head_dim), attend(packed[row, :heads], key, value))
        else:
            assert (out[row] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 4, 32])
def test_lengths_around_tiles_and_blocks(splits: int, dtype: torch.dtype) -> None:
    check([1, 0, 63, 64, 65, 200], 4, 2, 32, 64, splits, dtype)


@pytest.mark.parametrize("block_size", [16, 48, 256])
def test_block_sizes(block_size: int) -> None:
    check([100, 256, 17], 4, 2, 64, block_size, 4, torch.bfloat16)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 128), (5, 1, 64), (8, 1, 32), (32, 1, 32)])
def test_query_heads_that_share_keys(heads: int, kv_heads: int, head_dim: int) -> None:
    check([33, 70], heads, kv_heads, head_dim, 64, 2, torch.float32)


@pytest.mark.skipif(not COMPILED, reason="too large for the interpreter")
@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("rows", [1, 8, 64, 256])
def test_qwen3_shapes(rows: int, heads: int) -> None:
    lengths = torch.randint(1, 1500, (rows,), generator=torch.Generator().manual_seed(rows)).tolist()
    check(lengths, heads, 8, 128, 64, num_splits(rows, 8), torch.bfloat16)


def test_splits_fill_the_gpu() -> None:
    """A power of two; fewer the more rows there are."""
    splits = [num_splits(rows, 8) for rows in (1, 3, 8, 64, 1024)]
    assert splits == sorted(splits, reverse=True) and splits[-1] == 1
    assert all(count & (count - 1) == 0 for count in splits)
