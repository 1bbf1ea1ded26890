"""The 64 best tokens of rows that sample from so many or fewer, without a sort of the vocabulary.

The vocabulary is cut into groups of 64 tokens. The 64 groups with the largest maxima hold the 64 best tokens: a token
of another group is preceded by the maximum of each of those 64. So one pass takes the groups' maxima, and one program
per row selects 64 groups, another 64 of their 4,096 tokens. Programs of other rows end at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.candidates import (
    MAX_TOP_K,
    NARROW,
    TILE,
    TOP,
    SlotSampling,
    load_logits,
    num_chunks,
    order,
    pack,
    row_kind,
)
from worker_svc.kernels.launch import launch_options, release_next, row_stride, wait_for_previous

_GROUP = tl.constexpr(64)
_TILE_GROUPS = TILE // _GROUP.value


def top_candidates(
    logits: Tensor, slots: Tensor, sampling: SlotSampling, *, first_token: int = 0, pdl: bool = False
) -> Tensor:
    """The 64 best candidates of narrow rows, by token, [N, 64] int64: raw logits, before temperature and noise.

    Arguments as of gumbel.gumbel_candidates. Ranks stack what each returns before choose.choose_tokens.
    """
    rows, columns = logits.shape
    groups = triton.cdiv(columns, _GROUP.value)
    chunks = num_chunks(rows, columns)
    maxima = torch.empty(rows, groups, dtype=torch.float32, device=logits.device)
    best_groups = torch.empty(rows, MAX_TOP_K, dtype=torch.int32, device=logits.device)
    top = torch.empty(rows, MAX_TOP_K, dtype=torch.int64, device=logits.device)
    kind = (slots, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    suppression = (sampling.positions, sampling.suppressed_ids, sampling.suppressed_until)
    sizes = (row_stride(logits), columns)
    suppressed = {"NUM_SUPPRESSED": sampling.suppressed_ids.shape[1]}
    key_bits = {"KEY_BITS": 16 if logits.dtype == torch.bfloat16 else 32}
    _maxima_kernel[(rows, chunks)](
        logits,
        *kind,
        *suppression,
        maxima,
        *sizes,
        groups,
        triton.cdiv(columns, chunks * TILE) * _TILE_GROUPS,
        first_token,
        TILE_GROUPS=_TILE_GROUPS,
        num_warps=4,
        **suppressed,
        **launch_options(pdl),
    )
    _groups_kernel[(rows,)](
        *kind,
        maxima,
        best_groups,
        groups,
        GROUPS=max(triton.next_power_of_2(groups), MAX_TOP_K),
        num_warps=8,
        **key_bits,
        **launch_options(pdl),
    )
    _tokens_kernel[(rows,)](
        logits,
        *kind,
        *suppression,
        best_groups,
        top,
        *sizes,
        first_token,
        num_warps=8,
        **suppressed,
        **key_bits,
        **launch_options(pdl),
    )
    return top


@triton.jit
def _maxima_kernel(
    logits_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    suppressed_ids_ptr: tl.tensor,
    suppressed_until_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    logits_stride: tl.tensor,
    num_columns: tl.tensor,
    num_groups: tl.tensor,
    chunk_groups: tl.tensor,
    first_token: tl.tensor,
    NUM_SUPPRESSED: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per row and chunk of the vocabulary: the maximum of each group."""
    release_next(PDL)
    row = tl.program_id(0)
    wait_for_previous(PDL)
    slot = tl.load(slots_ptr + row)
    if row_kind(slot, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr) != NARROW:
        return
    suppressing = tl.load(positions_ptr + slot) < tl.load(suppressed_until_ptr + slot)
    ids_ptr = suppressed_ids_ptr + slot * NUM_SUPPRESSED
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    start = tl.program_id(1) * chunk_groups
    member = tl.arange(0, _GROUP)
    for first_group in range(start, tl.minimum(start + chunk_groups, num_groups), TILE_GROUPS):
        group = first_group + tl.arange(0, TILE_GROUPS)
        column = group[:, None] * _GROUP + member[None, :]  # [TILE_GROUPS, 64]
        logits = load_logits(row_ptr, column, num_columns, first_token, suppressing, ids_ptr, NUM_SUPPRESSED)
        tl.store(maxima_ptr + row * num_groups + group, tl.max(logits, axis=1), mask=group < num_groups)


@triton.jit
def _groups_kernel(
    slots_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    best_groups_ptr: tl.tensor,
    num_groups: tl.tensor,
    GROUPS: tl.constexpr,
    KEY_BITS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per row: the groups with the largest maxima, ascending."""
    release_next(PDL)
    row = tl.program_id(0)
    wait_for_previous(PDL)
    slot = tl.load(slots_ptr + row)
    if row_kind(slot, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr) != NARROW:
        return
    group = tl.arange(0, GROUPS)
    maxima = tl.load(maxima_ptr + row * num_groups + group, mask=group < num_groups, other=-float("inf"))
    place = _places(maxima, KEY_BITS)
    tl.store(best_groups_ptr + row * TOP + place, group, mask=place >= 0)


@triton.jit
def _tokens_kernel(
    logits_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    suppressed_ids_ptr: tl.tensor,
    suppressed_until_ptr: tl.tensor,
    best_groups_ptr: tl.tensor,
    top_ptr: tl.tensor,
    logits_stride: tl.tensor,
    num_columns: tl.tensor,
    first_token: tl.tensor,
    NUM_SUPPRESSED: tl.constexpr,
    KEY_BITS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per row: the best tokens of the best groups."""
    release_next(PDL)
    row = tl.program_id(0)
    wait_for_previous(PDL)
    slot = tl.load(slots_ptr + row)
    if row_kind(slot, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr) != NARROW:
        return
    suppressing = tl.load(positions_ptr + slot) < tl.load(suppressed_until_ptr + slot)
    ids_ptr = suppressed_ids_ptr + slot * NUM_SUPPRESSED
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    i = tl.arange(0, TOP * _GROUP)
    column = tl.load(best_groups_ptr + row * TOP + i // _GROUP) * _GROUP + i % _GROUP
    logits = load_logits(row_ptr, column, num_columns, first_token, suppressing, ids_ptr, NUM_SUPPRESSED)
    place = _places(logits, KEY_BITS)
    tl.store(top_ptr + row * TOP + place, pack(logits, column + first_token), mask=place >= 0)


@triton.jit
def _places(values: tl.tensor, KEY_BITS: tl.constexpr) -> tl.tensor:
    """Numbers the 64 largest values from 0 in the order of their indices; -1 for the others. Of equal ones those with
    lower indices are taken. KEY_BITS is 16 for values of bfloat16, whose lower bits say nothing.

    Finds the 64th largest bit by bit: the largest number that 64 keys reach.
    """
    key = (order(values) ^ -0x80000000).to(tl.uint32, bitcast=True) >> (32 - KEY_BITS)
    threshold = tl.full([], 0, tl.uint32)
    bit = tl.full([], 1, tl.uint32) << (KEY_BITS - 1)
    for _ in range(KEY_BITS):
        reached = tl.sum((key >= (threshold | bit)).to(tl.int32), axis=0)
        threshold = tl.where(reached >= TOP, threshold | bit, threshold)
        bit = bit >> 1
    equal = (key == threshold).to(tl.int32)
    larger = (key > threshold).to(tl.int32)
    room = TOP - tl.sum(larger, axis=0)
    chosen = larger | tl.where(tl.cumsum(equal, axis=0) <= room, equal, 0)
    return tl.where(chosen > 0, tl.cumsum(chosen, axis=0) - 1, -1)
