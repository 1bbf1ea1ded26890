"""Chooses each row's token from the candidates of all ranks. Reference: layers.sampler and layers.filters."""

import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.bitonic import largest
from worker_svc.kernels.candidates import (
    LOG2_E,
    NARROW,
    PLAIN,
    TOP,
    SlotSampling,
    pack,
    row_kind,
    unpack_token,
    unpack_value,
)
from worker_svc.kernels.launch import launch_options, release_next, wait_for_previous
from worker_svc.kernels.noise import gumbel, noise_bits, row_keys

_LOG_TOP = tl.constexpr(6)


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

    candidates  [any, N] int64, of gumbel.gumbel_candidates
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
            i = tl.arange(0, TOP << LOG_RANKS)
            at = (i // TOP * rows + row) * TOP + i % TOP
            top = tl.load(top_ptr + at, mask=i // TOP < ranks, other=-(2**63))
            top = largest(top, LOG_RANKS + _LOG_TOP, _LOG_TOP)
            first_key, second_key = row_keys(tl.load(seeds_ptr + slot), tl.load(positions_ptr + slot))
            noise = gumbel(noise_bits(first_key, second_key, unpack_token(top)))
            value = unpack_value(top) * (LOG2_E / tl.load(temperature_ptr + slot))
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
    i = tl.arange(0, TOP)
    value = tl.where(i < top_k, value, -float("inf"))
    p = tl.exp2(value - tl.max(value, axis=0))
    p = p / tl.sum(p, axis=0)
    before = tl.where(top_p < 1, tl.cumsum(p, axis=0) - p, 0.0)  # a rounded sum must not cut where top_p is off
    kept = (i < top_k) & (before < top_p) & (p >= min_p * tl.max(p, axis=0))
    return kept | (i == 0)
