"""All-reduce of rows between GPUs that reach each other's memory, and the norm of the sums in the same kernel.

As kernels.exchange, but words travel alone: an inbox is full of a word that nobody sends, so a word has arrived when it
is another one; who has read it puts that word back. Half the bytes, for which a word more is written where it is read.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.exchange import Inboxes, add_word, sum_of_words
from worker_svc.kernels.launch import launch_options, release_next, wait_for_previous

NOTHING = tl.constexpr(-0x7FFF8000)
"""What an inbox is full of while nothing is there: bfloat16 of -0.0 twice, a float32 of -4.6e-41. 0 is sent for it."""
MOST_WORDS = tl.constexpr(4096)
"""Of a row. Each has a place, whatever its size, that belongs to one program, which counts its exchanges."""
_WORDS_A_THREAD = 8


class RowNorm(NamedTuple):
    """RMSNorm: see kernels.norm."""

    weight: Tensor
    """[hidden]"""
    eps: float


def inbox_words(ranks: int, capacity: int) -> int:
    """int32 of an inbox, [2, ranks, capacity]; each is NOTHING at first."""
    return 2 * ranks * capacity


def all_reduce_rows(
    x: Tensor, inboxes: Inboxes, norm: RowNorm | None = None, *, out: Tensor | None = None, pdl: bool = False
) -> None:
    """The sum over the ranks, in place, added in float32 in the order of the ranks: bit for bit the same on all. With a
    norm, `out` becomes the norm of the sums.

    `x` and `out` [T, hidden] are contiguous, bfloat16 or float32. The inboxes have MOST_WORDS words and an element of
    `counts` for each row.
    """
    rows, words = x.view(torch.int32).shape
    assert rows <= len(inboxes.counts) and words <= MOST_WORDS.value, "callers choose another way for what does not fit"
    block = triton.next_power_of_2(words)
    _all_reduce_rows_kernel[(rows,)](
        x.view(torch.int32),
        x if norm is None else norm.weight.view(torch.int32),
        x if out is None else out.view(torch.int32),
        inboxes.addresses,
        inboxes.counts,
        words,
        inboxes.capacity,
        0.0 if norm is None else norm.eps,
        RANK=inboxes.rank,
        RANKS=len(inboxes.addresses),
        BFLOAT16=x.dtype == torch.bfloat16,
        NORM=norm is not None,
        BLOCK=block,
        num_warps=min(max(block // (32 * _WORDS_A_THREAD), 1), 16),
        **launch_options(pdl),
    )


@triton.jit
def _all_reduce_rows_kernel(
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    out_ptr: tl.tensor,
    addresses: tl.tuple,
    counts_ptr: tl.tensor,
    words: tl.tensor,
    capacity: tl.tensor,
    eps: tl.tensor,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BFLOAT16: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per row; a word holds one float32 or two bfloat16."""
    release_next(PDL)
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < words
    at = row * words + column
    weight = column
    if NORM:
        weight = tl.load(norm_ptr + column, mask=inside, other=0)
    wait_for_previous(PDL)
    number = tl.load(counts_ptr + row) + 1
    mine = tl.load(x_ptr + at, mask=inside, other=0)
    mine = tl.where(mine == NOTHING, 0, mine)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            tl.store(_place(addresses[peer], RANK, row, number, capacity, RANKS) + column, mine, mask=inside)
    even = tl.zeros([BLOCK], dtype=tl.float32)
    odd = tl.zeros([BLOCK], dtype=tl.float32)
    for source in tl.static_range(RANKS):
        word = mine
        if source != RANK:
            inbox = _place(addresses[RANK], source, row, number, capacity, RANKS) + column
            word = tl.load(inbox, mask=inside, other=0, volatile=True)
            while tl.max((word == NOTHING).to(tl.int32), axis=0) != 0:
                word = tl.load(inbox, mask=inside, other=0, volatile=True)
            tl.store(inbox, tl.full([BLOCK], NOTHING, tl.int32), mask=inside)
        even, odd = add_word(even, odd, word, BFLOAT16)
    total = sum_of_words(even, odd, BFLOAT16)
    tl.store(x_ptr + at, total, mask=inside)
    tl.store(counts_ptr + row, number)
    if NORM:
        tl.store(out_ptr + at, _normed(total, weight, words, eps, BFLOAT16, BLOCK), mask=inside)


@triton.jit
def _normed(
    word: tl.tensor, weight: tl.tensor, words: tl.tensor, eps: tl.tensor, BFLOAT16: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """As kernels.norm, of a row of words."""
    zero = tl.zeros([BLOCK], dtype=tl.float32)
    even, odd = add_word(zero, zero, word, BFLOAT16)
    even_weight, odd_weight = add_word(zero, zero, weight, BFLOAT16)
    size = words * 2 if BFLOAT16 else words
    scale = tl.rsqrt(tl.sum(even * even + odd * odd, axis=0) / size + eps)
    even, odd = even * scale, odd * scale
    if BFLOAT16:
        even, odd = even.to(tl.bfloat16).to(tl.float32), odd.to(tl.bfloat16).to(tl.float32)
    return sum_of_words(even * even_weight, odd * odd_weight, BFLOAT16)


@triton.jit
def _place(
    inbox: tl.tensor,
    source: tl.constexpr,
    row: tl.tensor,
    number: tl.tensor,
    capacity: tl.tensor,
    RANKS: tl.constexpr,
) -> tl.tensor:
    """Where `source` writes a row into an inbox."""
    half = ((number & 1) * RANKS + source).to(tl.int64) * capacity
    return tl.multiple_of(inbox.to(tl.pointer_type(tl.int32)) + half + row * MOST_WORDS, 16)
