"""Which FlashAttention runs where, and what FlashAttention-2 is asked: a stand-in computes what its documentation says.

The package itself needs a GPU.
"""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from shared.errors import StartupError
from worker_svc.layers.flash_attention import FlashAttention2, Heads, choose_flash
from worker_svc.layers.kv_cache import LayerCache

BLOCK = 256
HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
HOPPER, AMPERE, TURING = (9, 0), (8, 6), (7, 5)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """As flash_attn 2.8 documents it: K and V in pages, the causal mask aligned to the bottom right corner."""
    assert block_table is not None and k.shape[1] % 256 == 0
    assert all(index.dtype == torch.int32 for index in (cu_seqlens_q, cu_seqlens_k, block_table))
    assert len(cu_seqlens_q) == len(cu_seqlens_k) == len(block_table) + 1
    out = torch.full_like(q, torch.nan)
    for row, (first, end) in enumerate(zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True)):
        queries, keys = end - first, int(cu_seqlens_k[row + 1] - cu_seqlens_k[row])
        assert queries <= max_seqlen_q and keys <= max_seqlen_k
        kept = torch.ones(queries, keys).tril(keys - queries).bool() if causal else torch.ones(queries, keys).bool()
        pages = block_table[row].long()
        key, value = (memory[pages].flatten(0, 1)[:keys].repeat_interleave(2, dim=1) for memory in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[first:end], key) / q.shape[-1] ** 0.5
        out[first:end] = torch.einsum("hqk,khd->qhd", scores.masked_fill(~kept, -torch.inf).softmax(-1), value)
    return out


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Both packages, as far as they are needed here; None takes one out."""

    def packages(**names: Any) -> None:
        for name, package in names.items():
            monkeypatch.setitem(sys.modules, name, package)

    packages(
        flash_attn=SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func),
        flash_attn_interface=SimpleNamespace(flash_attn_with_kvcache=None, get_scheduler_metadata=None),
    )
    return packages


def test_rows_of_any_length_over_pages(installed: Any) -> None:
    """Against a loop over tokens that knows lengths alone; the last row is padding, and so are the last two tokens."""
    generator = torch.Generator().manual_seed(0)
    counts, lengths = [1, 7, 40, 0], [1, 300, 40, 0]
    tables = torch.tensor([[5, 0], [2, 4], [1, 0], [0, 0]], dtype=torch.int32)
    query = torch.randn(sum(counts) + 2, HEADS.num_heads, HEADS.head_dim, dtype=torch.float64, generator=generator)
    cache = LayerCache(*torch.randn(2, 6, BLOCK, 2, HEADS.head_dim, dtype=torch.float64, generator=generator))
    cu_seqlens = torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)
    step = FlashAttention2(HEADS, BLOCK).prepare(cu_seqlens, torch.tensor(lengths, dtype=torch.int32), tables, 48)
    out = step(query, cache)
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        places = [(int(tables[row, position // BLOCK]), position % BLOCK) for position in range(length)]
        for i in range(count):
            token, seen = int(cu_seqlens[row]) + i, places[: length - count + i + 1]
            for head in range(HEADS.num_heads):
                keys = torch.stack([cache.key[block, offset, head // 2] for block, offset in seen])
                values = torch.stack([cache.value[block, offset, head // 2] for block, offset in seen])
                weights = (keys @ query[token, head] / HEADS.head_dim**0.5).softmax(0)
                torch.testing.assert_close(out[token, head], weights @ values)


@pytest.mark.parametrize(
    ("attention", "capability", "block_size", "chosen"),
    [
        ("auto", HOPPER, 64, "fa3"),
        ("auto", AMPERE, 256, "fa2"),
        ("auto", AMPERE, 64, None),
        ("auto", TURING, 256, None),
        ("fa2", HOPPER, 512, "fa2"),
        ("triton", HOPPER, 256, None),
    ],
)
def test_chosen_by_hardware_and_block_size(
    installed: Any, attention: str, capability: tuple[int, int], block_size: int, chosen: str | None
) -> None:
    flash = choose_flash(attention, HEADS, block_size, capability)
    assert (None if flash is None else flash.name) == chosen


@pytest.mark.parametrize(
    ("attention", "capability", "block_size", "why"),
    [
        ("fa3", AMPERE, 256, "--attention fa3: FlashAttention-3: it needs a GPU of compute capability 9"),
        ("fa2", TURING, 256, "--attention fa2: FlashAttention-2: it needs a GPU of compute capability 8 or newer"),
        ("fa2", AMPERE, 64, "--block-size of 256 or a multiple, not 64"),
    ],
)
def test_one_that_was_asked_for_and_does_not_fit(
    installed: Any, attention: str, capability: tuple[int, int], block_size: int, why: str
) -> None:
    with pytest.raises(StartupError, match=why):
        choose_flash(attention, HEADS, block_size, capability)


def test_packages_that_are_not_installed(installed: Any) -> None:
    """The older one stands in; where neither is there, one warning says why of each."""
    installed(flash_attn_interface=None)
    flash = choose_flash("auto", HEADS, BLOCK, HOPPER)
    assert flash is not None and flash.name == "fa2"
    installed(flash_attn=None)
    with pytest.raises(StartupError, match="--attention fa2: FlashAttention-2: it is not installed"):
        choose_flash("fa2", HEADS, BLOCK, HOPPER)
    with capture_logs() as logs:
        assert choose_flash("auto", HEADS, BLOCK, HOPPER) is None
    (warning,) = logs
    assert all(f"{name}: it is not installed" in warning["reason"] for name in ("FlashAttention-3", "FlashAttention-2"))


def test_float32_has_no_flash_attention(installed: Any) -> None:
    with pytest.raises(StartupError, match="it does not compute in float32"):
        choose_flash("fa3", Heads(4, 2, 8, torch.float32), BLOCK, HOPPER)
