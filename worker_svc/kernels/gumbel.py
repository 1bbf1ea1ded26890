"""The best candidates of rows that sample from all tokens: argmax(logits / temperature - log E) with the noise of
kernels.noise, or the plain argmax. Reference: layers.sampler.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.candidates import (
    GREEDY_BELOW,
    LOG2_E,
    PLAIN,
    TILE,
    SlotSampling,
    load_logits,
    num_chunks,
    pack,
    row_kind,
)
from worker_svc.kernels.launch import launch_options, release_next, row_stride, wait_for_previous
from worker_svc.kernels.noise import gumbel, noise_bits, row_keys


def gumbel_candidates(
    logits: Tensor, slots: Tensor, sampling: SlotSampling, *, first_token: int = 0, pdl: bool = False
) -> Tensor:
    """The best candidates of plain rows, [chunks, N] int64.

    `logits` [N, tokens of this rank], whose first is `first_token`; bfloat16 or float32; -infinity where they are
    padding, which all ranks need to bring as many candidates. `slots` [N] int32, -1 for no row. Ranks concatenate what
    each returns before choose.choose_tokens.
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
        triton.cdiv(columns, chunks * TILE) * TILE,
        first_token,
        NUM_SUPPRESSED=sampling.suppressed_ids.shape[1],
        TILE=TILE,
        num_warps=4,
        **launch_options(pdl),
    )
    return candidates


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
    greedy = temperature < GREEDY_BELOW
    scale = LOG2_E / temperature
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    start = tl.program_id(1) * chunk
    lane = tl.arange(0, TILE)
    best = tl.full([TILE], -float("inf"), tl.float32)
    best_token = tl.zeros([TILE], tl.int32)
    for offset in range(start, tl.minimum(start + chunk, num_columns), TILE):
        column = offset + lane
        token = (first_token + offset) + lane
        ids_ptr = suppressed_ids_ptr + slot * NUM_SUPPRESSED
        value = load_logits(row_ptr, column, num_columns, first_token, suppressing, ids_ptr, NUM_SUPPRESSED)
        if not greedy:
            value = value * scale + gumbel(noise_bits(first_key, second_key, token))
        better = value > best
        best = tl.where(better, value, best)
        best_token = tl.where(better, token, best_token)
    candidate = tl.max(pack(best, best_token), axis=0)
    tl.store(candidates_ptr + tl.program_id(1) * tl.num_programs(0) + row, candidate)
