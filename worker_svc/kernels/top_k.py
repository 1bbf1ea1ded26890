"""The 64 best tokens of rows that sample from so many or fewer, without a sort of the vocabulary.

The vocabulary is cut into groups of 64 tokens. The 64 groups with the largest maxima hold the 64 best tokens: a token
of another group is preceded by the maximum of each of those 64. So one pass takes the groups' maxima, and one program
per row picks 64 groups and then the best of their 4,096 tokens. Both kernels cost nothing for other rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.kernels.bitonic import largest
from worker_svc.kernels.launch import launch_options, release_next, row_stride, wait_for_previous
from worker_svc.kernels.sampling import (
    MAX_TOP_K,
    NARROW,
    SlotSampling,
    load_logits,
    num_chunks,
    pack,
    row_kind,
    unpack_token,
)

_TOP = tl.constexpr(MAX_TOP_K)
_LOG_TOP = tl.constexpr(6)
_GROUP = tl.constexpr(64)
_LOG_GROUP = tl.constexpr(6)
_TILE_GROUPS = 16


def top_candidates(
    logits: Tensor, slots: Tensor, sampling: SlotSampling, *, first_token: int = 0, pdl: bool = False
) -> Tensor:
    """The 64 best candidates of narrow rows, best first, [N, 64] int64: raw logits, before temperature and noise.

    Arguments as of sampling.gumbel_candidates. Ranks stack what each returns before sampling.choose_tokens.
    """
    rows, columns = logits.shape
    groups = triton.cdiv(columns, _GROUP.value)
    tile = _TILE_GROUPS * _GROUP.value
    chunks = num_chunks(rows, columns)
    maxima = torch.empty(rows, groups, dtype=torch.float32, device=logits.device)
    top = torch.empty(rows, MAX_TOP_K, dtype=torch.int64, device=logits.device)
    state = (
        slots,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.positions,
        sampling.suppressed_ids,
        sampling.suppressed_until,
    )
    sizes = (row_stride(logits), columns, groups)
    options = {"NUM_SUPPRESSED": sampling.suppressed_ids.shape[1], **launch_options(pdl)}
    chunk_groups = triton.cdiv(columns, chunks * tile) * _TILE_GROUPS
    _maxima_kernel[(rows, chunks)](
        logits, *state, maxima, *sizes, chunk_groups, first_token, TILE_GROUPS=_TILE_GROUPS, num_warps=4, **options
    )
    _top_kernel[(rows,)](
        logits,
        *state,
        maxima,
        top,
        *sizes,
        first_token,
        LOG_GROUPS=max((groups - 1).bit_length(), _LOG_TOP.value),
        num_warps=8,
        **options,
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
def _top_kernel(
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
    top_ptr: tl.tensor,
    logits_stride: tl.tensor,
    num_columns: tl.tensor,
    num_groups: tl.tensor,
    first_token: tl.tensor,
    NUM_SUPPRESSED: tl.constexpr,
    LOG_GROUPS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per row. Of equal groups the lower comes first, as of equal tokens."""
    release_next(PDL)
    row = tl.program_id(0)
    wait_for_previous(PDL)
    slot = tl.load(slots_ptr + row)
    if row_kind(slot, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr) != NARROW:
        return
    suppressing = tl.load(positions_ptr + slot) < tl.load(suppressed_until_ptr + slot)
    ids_ptr = suppressed_ids_ptr + slot * NUM_SUPPRESSED
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    group = tl.arange(0, 1 << LOG_GROUPS)
    maxima = tl.load(maxima_ptr + row * num_groups + group, mask=group < num_groups, other=-float("inf"))
    best_groups = unpack_token(largest(pack(maxima, group), LOG_GROUPS, _LOG_TOP))
    column = tl.reshape(best_groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :], [_TOP * _GROUP])
    logits = load_logits(row_ptr, column, num_columns, first_token, suppressing, ids_ptr, NUM_SUPPRESSED)
    top = largest(pack(logits, column + first_token), _LOG_TOP + _LOG_GROUP, _LOG_TOP)
    tl.store(top_ptr + row * _TOP + tl.arange(0, _TOP), top)
