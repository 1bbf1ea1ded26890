"""Decode attention equals softmax attention in float64, whatever the lengths, blocks and parts are."""

import pytest
import torch
from torch import Tensor

from tests.kernels import COMPILED, DEVICE, DTYPES, assert_close, ints, poisoned, randn
from worker_svc.kernels.paged_attention import paged_attention
from worker_svc.kernels.parts import cut_rows


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[num_heads, head_dim] over [length, num_kv_heads, head_dim], in float64."""
    query, key, value = (x.double().cpu() for x in (query, key, value))
    shared = len(query) // key.shape[1]
    key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
    weights = (torch.einsum("hd,lhd->hl", query, key) / query.shape[1] ** 0.5).softmax(-1)
    return torch.einsum("hl,lhd->hd", weights, value)


def check(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    layers: int = 1,
) -> None:
    """Blocks in random order; what lies beyond a row's end and in blocks of nobody is NaN."""
    rows = len(lengths)
    width = -(-max(lengths) // block_size)
    order = torch.randperm(rows * width + 1, generator=torch.Generator().manual_seed(1))
    tables = order[: rows * width].view(rows, width)
    caches = [poisoned(rows * width + 1, block_size, kv_heads, head_dim, dtype=dtype) for _ in range(2)]
    contexts = []
    for row, length in enumerate(lengths):
        key_and_value = []
        for seed, cache in enumerate(caches):
            part = randn(length, kv_heads, head_dim, dtype=dtype, seed=10 * row + seed)
            token = torch.arange(length)
            cache[tables[row][token // block_size].to(DEVICE), (token % block_size).to(DEVICE)] = part
            key_and_value.append(part)
        contexts.append(key_and_value)
    packed = randn(rows, heads + 2, head_dim, dtype=dtype, seed=5)  # the heads after the queries are not read
    table_rows = torch.arange(rows).flip(0)  # row r has its table at another place
    parts = cut_rows(
        ints([row if length else -1 for row, length in zip(table_rows.tolist(), lengths, strict=True)]),
        ints(lengths[::-1]),
        kv_heads,
    )
    expected = [attend(packed[row, :heads], *contexts[row]) if length else None for row, length in enumerate(lengths)]
    for _ in range(layers):
        out = poisoned(rows, heads * head_dim, dtype=dtype)
        paged_attention(packed.flatten(1), *caches, ints(tables.flip(0).tolist()), parts, out=out)
        for row, attended in enumerate(expected):
            if attended is None:
                assert (out[row] == 0).all()
            else:
                assert_close(out[row].view(heads, head_dim), attended)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_around_tiles_and_blocks(dtype: torch.dtype) -> None:
    check([1, 0, 63, 64, 65, 200], 4, 2, 32, 64, dtype)


def test_parts_are_put_together_in_every_layer() -> None:
    check([1, 700, 0, 64, 330], 4, 2, 32, 64, torch.float32, layers=3)


def test_one_long_row_has_many_parts() -> None:
    check([2500], 2, 1, 32, 64, torch.float32)


def test_many_rows() -> None:
    """None is cut but the longest; some are padding."""
    check([*range(20, 76, 2), 300, 0, 0], 2, 2, 32, 16, torch.float32)


@pytest.mark.parametrize("block_size", [16, 48, 256])
def test_block_sizes(block_size: int) -> None:
    check([100, 256, 17], 4, 2, 64, block_size, torch.bfloat16)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 128), (5, 1, 64), (8, 1, 32), (32, 1, 32)])
def test_query_heads_that_share_keys(heads: int, kv_heads: int, head_dim: int) -> None:
    check([33, 70], heads, kv_heads, head_dim, 64, torch.float32)


@pytest.mark.skipif(not COMPILED, reason="too large for the interpreter")
@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("rows", [1, 8, 64, 256])
def test_qwen3_shapes(rows: int, heads: int) -> None:
    lengths = torch.randint(1, 1500, (rows,), generator=torch.Generator().manual_seed(rows)).tolist()
    check(lengths, heads, 8, 128, 64, torch.bfloat16, layers=3)
