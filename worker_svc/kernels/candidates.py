"""What the sampling kernels share: how slots sample, and candidates, a value and a token packed into one int64.

Candidates travel between the kernels, and between ranks that have parts of the vocabulary. The largest int64 is the
best candidate; of equal values it is the one with the lowest token.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

MAX_TOP_K = 64
TOP = tl.constexpr(MAX_TOP_K)
TILE = 1024  # logits at a time
GREEDY_BELOW = tl.constexpr(1e-5)  # as step_inputs: temperatures that would overflow float32 logits
LOG2_E = tl.constexpr(1.4426950408889634)
_PROGRAMS = 2048  # enough to fill a GPU

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
    wanted = max(min(_PROGRAMS // num_rows, num_columns // TILE), 1)
    return 1 << (wanted.bit_length() - 1)


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
    plain = unfiltered | (tl.load(temperature_ptr + index) < GREEDY_BELOW)
    narrow = (top_k > 0) & (top_k <= TOP)
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
