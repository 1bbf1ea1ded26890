"""Samples a token from each row of logits: argmax(logits / temperature - log E) with the noise of kernels.noise, or the
plain argmax. Reference: layers.sampler.

Candidates, a value and a token packed into one int64, travel between the kernels, and between ranks that have parts of
the vocabulary: the largest int64 is the best candidate, of equal values the one with the lowest token.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.bitonic import largest
from worker_svc.kernels.launch import launch_options, release_next, row_stride, wait_for_previous
from worker_svc.kernels.noise import gumbel, noise_bits, row_keys

MAX_TOP_K = 64
_TOP = tl.constexpr(MAX_TOP_K)
_LOG_TOP = tl.constexpr(6)
_TILE = 1024
_PROGRAMS = 2048  # enough to fill a GPU
_GREEDY_BELOW = tl.constexpr(1e-5)  # as runner.sampling_state: temperatures that would overflow float32 logits
_LOG2_E = tl.constexpr(1.4426950408889634)

PLAIN = tl.constexpr(0)
"""Greedy, or sampled from all tokens."""
NARROW = tl.constexpr(1)
"""Sampled from the top 64 tokens or fewer."""
OTHER = tl.constexpr(2)
"""No row (slot -1), or filtered in a way that needs the whole distribution: left to the caller."""


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """How each of S slots samples; tensors on the device."""

    temperature: Tensor
    """[S] float32; below 1e-5 takes the most likely token."""
    top_k: Tensor
    """[S] int32; 0 keeps all."""
    top_p: Tensor
    """[S] float32; 1 keeps all."""
    min_p: Tensor
    """[S] float32; 0 keeps all."""
    seeds: Tensor
    """[S] int64: the bits of the unsigned seed."""
    positions: Tensor
    """[S] int32: absolute position of the token that is sampled next, the sequence's length."""
    suppressed_ids: Tensor
    """[S, any] int32: tokens that may not be sampled before `suppressed_until`; -1 is none."""
    suppressed_until: Tensor
    """[S] int32: a position."""


def num_chunks(num_rows: int, num_columns: int) -> int:
    """How many programs share a row: a power of two."""
    wanted = max(min(_PROGRAMS // num_rows, num_columns // _TILE), 1)
    return 1 << (wanted.bit_length() - 1)


def gumbel_candidates(
    logits: Tensor, slots: Tensor, sampling: SlotSampling, *, first_token: int = 0, pdl: bool = False
) -> Tensor:
    """The best candidates of plain rows, [chunks, N] int64.

    `logits` [N, tokens of this rank], whose first is `first_token`; bfloat16 or float32; padding cut off. `slots` [N]
    int32, -1 for no row. Ranks concatenate what each returns before choose_tokens.
    """
    rows, columns = logits.shape
    chunks = num_chunks(rows, columns)
    candidates = torch.empty(chunks, rows, dtype=torch.int64, device=logits.device)
    _gumbel_kernel[(rows, chunks)](
        logits,
        slots,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seeds,
        sampling.positions,
        sampling.suppressed_ids,
        sampling.suppressed_until,
        candidates,
        row_stride(logits),
        columns,
        triton.cdiv(columns, chunks * _TILE) * _TILE,
        first_token,
        NUM_SUPPRESSED=sampling.suppressed_ids.shape[1],
        TILE=_TILE,
        num_warps=4,
        **launch_options(pdl),
    )
    return candidates


def choose_tokens(
    candidates: Tensor,
    top: Tensor | None,
    slots: Tensor,
    sampling: SlotSampling,
    *,
    tokens: Tensor,
    failed: Tensor,
    pdl: bool = False,
) -> None:
    """Chooses each row's token from the candidates of all ranks.

    candidates  [any, N] int64, of gumbel_candidates
    top         [ranks, N, 64] int64, of top_k.top_candidates; None where no row is narrow
    tokens      [N] int32; 0 where the row failed or is none of these kernels' rows
    failed      [N] int32: 1 where the row's logits had no finite maximum
    """
    count, rows = candidates.shape
    ranks = 0 if top is None else top.shape[0]
    _choose_kernel[(rows,)](
        candidates,
        candidates if top is None else top,
        slots,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seeds,
        sampling.positions,
        tokens,
        failed,
        count,
        ranks,
        COUNT=triton.next_power_of_2(count),
        HAS_TOP=top is not None,
        LOG_RANKS=max(ranks - 1, 0).bit_length(),
        num_warps=4,
        **launch_options(pdl),
    )


@triton.jit
def order(value: tl.tensor) -> tl.tensor:
    """An int32 that orders as the float32 does."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)  # -0 equals 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def pack(value: tl.tensor, token: tl.tensor) -> tl.tensor:
    """A float32 value and a token in one int64 that orders by value, then by the lower token."""
    return (order(value).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def unpack_value(candidate: tl.tensor) -> tl.tensor:
    """The float32 of a candidate."""
    bits = (candidate >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def unpack_token(candidate: tl.tensor) -> tl.tensor:
    """The int32 of a candidate."""
    return 0x7FFFFFFF - (candidate & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def row_kind(
    slot: tl.tensor, temperature_ptr: tl.tensor, top_k_ptr: tl.tensor, top_p_ptr: tl.tensor, min_p_ptr: tl.tensor
) -> tl.tensor:
    """PLAIN, NARROW or OTHER."""
    index = tl.maximum(slot, 0)
    top_k = tl.load(top_k_ptr + index)
    unfiltered = (top_k == 0) & (tl.load(top_p_ptr + index) >= 1) & (tl.load(min_p_ptr + index) <= 0)
    plain = unfiltered | (tl.load(temperature_ptr + index) < _GREEDY_BELOW)
    narrow = (top_k > 0) & (top_k <= _TOP)
    kind = tl.where(plain, PLAIN, tl.where(narrow, NARROW, OTHER))
    return tl.where(slot >= 0, kind, OTHER)


@triton.jit
def load_logits(
    row_ptr: tl.tensor,
    column: tl.tensor,
    num_columns: tl.tensor,
    first_token: tl.tensor,
    suppressing: tl.tensor,
    suppressed_ids_ptr: tl.tensor,
    NUM_SUPPRESSED: tl.constexpr,
) -> tl.tensor:
    """float32; -infinity outside the row and for suppressed tokens. A NaN counts as +infinity, so that it wins and the
    row fails."""
    logits = tl.load(row_ptr + column, mask=column < num_columns, other=-float("inf")).to(tl.float32)
    if suppressing:
        for i in range(NUM_SUPPRESSED):
            logits = tl.where(column + first_token == tl.load(suppressed_ids_ptr + i), -float("inf"), logits)
    return tl.where(logits == logits, logits, float("inf"))


@triton.jit
def _gumbel_kernel(
    logits_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    suppressed_ids_ptr: tl.tensor,
    suppressed_until_ptr: tl.tensor,
    candidates_ptr: tl.tensor,
    logits_stride: tl.tensor,
    num_columns: tl.tensor,
    chunk: tl.tensor,
    first_token: tl.tensor,
    NUM_SUPPRESSED: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per row and chunk of the vocabulary."""
    release_next(PDL)
    row = tl.program_id(0)
    wait_for_previous(PDL)
    slot = tl.load(slots_ptr + row)
    if row_kind(slot, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr) != PLAIN:
        return
    temperature = tl.load(temperature_ptr + slot)
    position = tl.load(positions_ptr + slot)
    first_key, second_key = row_keys(tl.load(seeds_ptr + slot), position)
    suppressing = position < tl.load(suppressed_until_ptr + slot)
    greedy = temperature < _GREEDY_BELOW
    scale = _LOG2_E / temperature
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    start = tl.program_id(1) * chunk
    lane = tl.arange(0, TILE)
    best = tl.full([TILE], -float("inf"), tl.float32)
    best_column = tl.zeros([TILE], tl.int32)
    for offset in range(start, tl.minimum(start + chunk, num_columns), TILE):
        column = offset + lane
        ids_ptr = suppressed_ids_ptr + slot * NUM_SUPPRESSED
        value = load_logits(row_ptr, column, num_columns, first_token, suppressing, ids_ptr, NUM_SUPPRESSED)
        if not greedy:
            value = value * scale + gumbel(noise_bits(first_key, second_key, column + first_token))
        better = value > best
        best = tl.where(better, value, best)
        best_column = tl.where(better, column, best_column)
    candidate = tl.max(pack(best, best_column + first_token), axis=0)
    tl.store(candidates_ptr + tl.program_id(1) * tl.num_programs(0) + row, candidate)


@triton.jit
def _choose_kernel(
    candidates_ptr: tl.tensor,
    top_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    failed_ptr: tl.tensor,
    count: tl.tensor,
    ranks: tl.tensor,
    COUNT: tl.constexpr,
    HAS_TOP: tl.constexpr,
    LOG_RANKS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per row."""
    release_next(PDL)
    row = tl.program_id(0)
    rows = tl.num_programs(0)
    wait_for_previous(PDL)
    slot = tl.load(slots_ptr + row)
    kind = row_kind(slot, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr)
    token = 0
    failed = 0
    if kind == PLAIN:
        i = tl.arange(0, COUNT)
        best = tl.max(tl.load(candidates_ptr + i * rows + row, mask=i < count, other=-(2**63)), axis=0)
        finite = tl.abs(unpack_value(best)) < float("inf")
        token = tl.where(finite, unpack_token(best), 0)
        failed = tl.where(finite, 0, 1)
    if HAS_TOP:
        if kind == NARROW:
            i = tl.arange(0, _TOP << LOG_RANKS)
            at = (i // _TOP * rows + row) * _TOP + i % _TOP
            top = tl.load(top_ptr + at, mask=i // _TOP < ranks, other=-(2**63))
            top = largest(top, LOG_RANKS + _LOG_TOP, _LOG_TOP)
            first_key, second_key = row_keys(tl.load(seeds_ptr + slot), tl.load(positions_ptr + slot))
            noise = gumbel(noise_bits(first_key, second_key, unpack_token(top)))
            value = unpack_value(top) * (_LOG2_E / tl.load(temperature_ptr + slot))
            kept = _kept(value, tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot), tl.load(min_p_ptr + slot))
            best = tl.max(pack(tl.where(kept, value + noise, -float("inf")), unpack_token(top)), axis=0)
            finite = tl.abs(unpack_value(tl.max(top, axis=0))) < float("inf")
            token = tl.where(finite, unpack_token(best), 0)
            failed = tl.where(finite, 0, 1)
    tl.store(tokens_ptr + row, token)
    tl.store(failed_ptr + row, failed)


@triton.jit
def _kept(value: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, min_p: tl.tensor) -> tl.tensor:
    """Which of the descending values over temperature, in units of log 2, the filters keep: see layers.filters."""
    i = tl.arange(0, _TOP)
    value = tl.where(i < top_k, value, -float("inf"))
    p = tl.exp2(value - tl.max(value, axis=0))
    p = p / tl.sum(p, axis=0)
    before = tl.where(top_p < 1, tl.cumsum(p, axis=0) - p, 0.0)  # a rounded sum must not cut where top_p is off
    kept = (i < top_k) & (before < top_p) & (p >= min_p * tl.max(p, axis=0))
    return kept | (i == 0)
