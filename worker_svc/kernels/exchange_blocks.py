"""All-reduce between two or more GPUs that reach each other's memory, for messages large enough that bytes rule.

As kernels.exchange, but words travel alone: a program writes its block into the others' inboxes, then, once all of it
is there, the number of the exchange into a flag beside. That takes longer for few words, and half the bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.exchange import Inboxes, add_word, sum_of_words
from worker_svc.kernels.launch import launch_options, release_next, wait_for_previous

BLOCK = 2048
"""Words of one program."""
_WARPS = 8


def inbox_words(ranks: int, capacity: int) -> int:
    """int32 of an inbox: words, [2, ranks, capacity], then flags, [ranks, capacity / BLOCK]."""
    return 2 * ranks * capacity + ranks * (capacity // BLOCK)


def all_reduce_blocks(values: Tensor, inboxes: Inboxes, *, pdl: bool = False) -> None:
    """See exchange.all_reduce, which it equals."""
    words = values.view(-1).view(torch.int32)
    assert len(words) <= inboxes.capacity, "callers split what does not fit"
    _all_reduce_blocks_kernel[(triton.cdiv(len(words), BLOCK),)](
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


@triton.jit
def _all_reduce_blocks_kernel(
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
    """One program per BLOCK words."""
    release_next(PDL)
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_words
    wait_for_previous(PDL)
    number = tl.load(counts_ptr + program) + 1
    mine = tl.load(words_ptr + at, mask=inside, other=0)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            tl.store(_half(addresses[peer], RANK, number, capacity, RANKS) + at, mine, mask=inside)
    tl.debug_barrier()  # all threads have written before one says so
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            flag = _flags(addresses[peer], RANK, capacity, RANKS, BLOCK) + program
            tl.atomic_xchg(flag, number, sem="release", scope="sys")
    even = tl.zeros([BLOCK], dtype=tl.float32)
    odd = tl.zeros([BLOCK], dtype=tl.float32)
    for source in tl.static_range(RANKS):
        word = mine
        if source != RANK:
            flag = _flags(addresses[RANK], source, capacity, RANKS, BLOCK) + program
            while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - number < 0:  # the next number may be there
                pass
            tl.debug_barrier()  # no thread reads before one has seen the flag
            inbox = _half(addresses[RANK], source, number, capacity, RANKS) + at
            word = tl.load(inbox, mask=inside, other=0, cache_modifier=".cg")
        even, odd = add_word(even, odd, word, BFLOAT16)
    tl.store(words_ptr + at, sum_of_words(even, odd, BFLOAT16), mask=inside)
    tl.store(counts_ptr + program, number)


@triton.jit
def _half(
    inbox: tl.tensor, source: tl.constexpr, number: tl.tensor, capacity: tl.tensor, RANKS: tl.constexpr
) -> tl.tensor:
    """Where `source` writes words into an inbox."""
    words = inbox.to(tl.pointer_type(tl.int32)) + ((number & 1) * RANKS + source).to(tl.int64) * capacity
    return tl.multiple_of(words, 16)


@triton.jit
def _flags(
    inbox: tl.tensor, source: tl.constexpr, capacity: tl.tensor, RANKS: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Where `source` writes numbers into an inbox, one for each program."""
    words = inbox.to(tl.pointer_type(tl.int32)) + capacity.to(tl.int64) * (2 * RANKS)
    return words + source * (capacity // BLOCK)
