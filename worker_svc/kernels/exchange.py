"""All-reduce and all-gather between GPUs that reach each other's memory, for messages small enough that latency rules.

Every rank writes its words straight into the inboxes of all and reads its own. A word travels beside the number of the
exchange in one 8-byte store, so its arrival needs no flag, fence or barrier: the LL protocol of NCCL. Inboxes have two
halves, used in turn: who writes for exchange n + 2 has all words of n + 1, so their senders have read those of n.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.launch import launch_options, release_next, wait_for_previous

BLOCK = 512
"""Words of one program. The same words always belong to the same program, which counts its exchanges."""
_WARPS = 4


@dataclass(frozen=True, slots=True)
class Inboxes:
    """What one rank needs to exchange words with the others. All ranks must make the same exchanges in the same order,
    one at a time."""

    rank: int
    addresses: tuple[int, ...]
    """Of each rank's inbox, at first full of zeros, or as kernels.exchange_rows has it."""
    capacity: int
    """Most words of an exchange."""
    counts: Tensor
    """[most programs] int32, zero at first: exchanges that each program has had. They may overflow."""


def inbox_words(ranks: int, capacity: int) -> int:
    """int32 of an inbox: [2, ranks, capacity] of words and numbers."""
    return 2 * ranks * capacity * 2


def all_reduce(values: Tensor, inboxes: Inboxes, *, pdl: bool = False) -> None:
    """The sum over the ranks, in place, added in float32 in the order of the ranks: bit for bit the same on all.

    `values` is contiguous, bfloat16 (an even number of elements) or float32, of at most `capacity` x 4 bytes.
    """
    words = values.view(-1).view(torch.int32)
    _all_reduce_kernel[_grid(words, inboxes)](
        words,
        inboxes.addresses,
        inboxes.counts,
        len(words),
        inboxes.capacity,
        RANK=inboxes.rank,
        RANKS=len(inboxes.addresses),
        BFLOAT16=values.dtype == torch.bfloat16,
        BLOCK=BLOCK,
        num_warps=_WARPS,
        **launch_options(pdl),
    )


def all_gather(values: Tensor, inboxes: Inboxes, *, out: Tensor, pdl: bool = False) -> None:
    """out[r] = `values` of rank r. Both contiguous, of any type whose bytes are whole words, at most `capacity`."""
    words = values.view(-1).view(torch.int32)
    _all_gather_kernel[_grid(words, inboxes)](
        words,
        out.view(-1).view(torch.int32),
        inboxes.addresses,
        inboxes.counts,
        len(words),
        inboxes.capacity,
        RANK=inboxes.rank,
        RANKS=len(inboxes.addresses),
        BLOCK=BLOCK,
        num_warps=_WARPS,
        **launch_options(pdl),
    )


def _grid(words: Tensor, inboxes: Inboxes) -> tuple[int]:
    assert len(words) <= inboxes.capacity, "callers choose another way for what does not fit"
    return (triton.cdiv(len(words), BLOCK),)


@triton.jit
def _all_reduce_kernel(
    words_ptr: tl.tensor,
    addresses: tl.tuple,
    counts_ptr: tl.tensor,
    num_words: tl.tensor,
    capacity: tl.tensor,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BFLOAT16: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per BLOCK words; a word holds one float32 or two bfloat16."""
    release_next(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_words
    wait_for_previous(PDL)
    number = tl.load(counts_ptr + tl.program_id(0)) + 1
    _send(tl.load(words_ptr + at, mask=inside, other=0), at, inside, number, addresses, capacity, RANK, RANKS)
    even = tl.zeros([BLOCK], dtype=tl.float32)
    odd = tl.zeros([BLOCK], dtype=tl.float32)
    for source in tl.static_range(RANKS):
        word = _receive(source, at, inside, number, addresses, capacity, RANK, RANKS)
        even, odd = add_word(even, odd, word, BFLOAT16)
    tl.store(words_ptr + at, sum_of_words(even, odd, BFLOAT16), mask=inside)
    tl.store(counts_ptr + tl.program_id(0), number)


@triton.jit
def _all_gather_kernel(
    words_ptr: tl.tensor,
    out_ptr: tl.tensor,
    addresses: tl.tuple,
    counts_ptr: tl.tensor,
    num_words: tl.tensor,
    capacity: tl.tensor,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per BLOCK words."""
    release_next(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_words
    wait_for_previous(PDL)
    number = tl.load(counts_ptr + tl.program_id(0)) + 1
    _send(tl.load(words_ptr + at, mask=inside, other=0), at, inside, number, addresses, capacity, RANK, RANKS)
    for source in tl.static_range(RANKS):
        word = _receive(source, at, inside, number, addresses, capacity, RANK, RANKS)
        tl.store(out_ptr + source * num_words + at, word, mask=inside)
    tl.store(counts_ptr + tl.program_id(0), number)


@triton.jit
def add_word(even: tl.tensor, odd: tl.tensor, word: tl.tensor, BFLOAT16: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Adds one float32, or two bfloat16 to a sum each."""
    if BFLOAT16:
        return even + (word << 16).to(tl.float32, bitcast=True), odd + (word & -65536).to(tl.float32, bitcast=True)
    else:
        return even + word.to(tl.float32, bitcast=True), odd


@triton.jit
def sum_of_words(even: tl.tensor, odd: tl.tensor, BFLOAT16: tl.constexpr) -> tl.tensor:
    """The word that holds the sums, rounded once."""
    if BFLOAT16:
        low = even.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return (odd.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16) | low
    else:
        return even.to(tl.int32, bitcast=True)


@triton.jit
def _send(
    words: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    number: tl.tensor,
    addresses: tl.tuple,
    capacity: tl.tensor,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """Into every inbox, this rank's own too."""
    marked = (number.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    for peer in tl.static_range(RANKS):
        tl.store(_half(addresses[peer], RANK, number, capacity, RANKS) + at, marked, mask=inside)


@triton.jit
def _receive(
    source: tl.constexpr,
    at: tl.tensor,
    inside: tl.tensor,
    number: tl.tensor,
    addresses: tl.tuple,
    capacity: tl.tensor,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
) -> tl.tensor:
    """Waits for the words of a rank in this rank's own inbox."""
    inbox = _half(addresses[RANK], source, number, capacity, RANKS) + at
    expected = number.to(tl.int64)
    marked = tl.load(inbox, mask=inside, other=expected << 32, volatile=True)
    while tl.max(((marked >> 32) != expected).to(tl.int32), axis=0) != 0:
        marked = tl.load(inbox, mask=inside, other=expected << 32, volatile=True)
    return marked.to(tl.int32)


@triton.jit
def _half(
    inbox: tl.tensor, source: tl.constexpr, number: tl.tensor, capacity: tl.tensor, RANKS: tl.constexpr
) -> tl.tensor:
    """Where `source` writes into an inbox."""
    words = inbox.to(tl.pointer_type(tl.int64)) + ((number & 1) * RANKS + source).to(tl.int64) * capacity
    return tl.multiple_of(words, 16)
