"""What sequences do to their logits before temperature and filters: tensors in, logits changed in place.

Works on the logits of one rank's tokens and needs no other rank. Knows no slot: runner.slot_rules gathers the rows.
No size depends on a value of the device, so nothing here waits for it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenValues:
    """K values that are added to logits of M rows."""

    rows: Tensor
    """[K] int64"""
    token_ids: Tensor
    """[K] int64"""
    values: Tensor
    """[K]"""


@dataclass(frozen=True, slots=True)
class BadWords:
    """W sequences of tokens that M rows may not complete."""

    rows: Tensor
    """[W] int64"""
    prefixes: Tensor
    """[W, P] int64: all tokens but the last, at the right; -1 before them."""
    lengths: Tensor
    """[W] int64: how many tokens of `prefixes` count."""
    last_tokens: Tensor
    """[W] int64"""


@dataclass(frozen=True, slots=True)
class Penalties:
    """Of B rows among M."""

    rows: Tensor
    """[B] int64"""
    repetition: Tensor
    """[B, 1]; 1 is off."""
    frequency: Tensor
    """[B, 1]"""
    presence: Tensor
    """[B, 1]"""


@dataclass(frozen=True, slots=True)
class RuleTensors:
    """The rules of M rows that sample. What no row has is None."""

    allowed: tuple[Tensor, Tensor] | None
    """[A] int64 rows, [A, tokens of this rank / 8] uint8: bit n % 8 of byte n // 8 is set if token n of this rank may
    be sampled."""
    bad_words: BadWords | None
    bias: TokenValues | None
    penalties: Penalties | None


@dataclass(frozen=True, slots=True)
class Context:
    """The tokens so far of the same M rows."""

    tokens: Tensor
    """[M, L] int64; undefined from `lengths` on, and in rows whose rules don't look back."""
    prompt_lengths: Tensor
    """[M] int64"""
    lengths: Tensor
    """[M] int64: tokens of prompt and output."""


def apply_rules(logits: Tensor, start: int, rules: RuleTensors, context: Context) -> None:
    """Changes `logits` [M, N], float32 or float64: those of the tokens from `start` on."""
    if rules.allowed is not None:
        rows, bits = rules.allowed
        logits[rows] = logits[rows].masked_fill(_unpacked(bits) == 0, -torch.inf)
    if rules.bad_words is not None:
        _add(logits, start, _forbidden(rules.bad_words, context))
    if rules.bias is not None:
        _add(logits, start, rules.bias)
    if rules.penalties is not None:
        _penalize(logits, start, rules.penalties, context)


def _unpacked(bits: Tensor) -> Tensor:
    """[A, 8 * B] of [A, B] bytes."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits[:, :, None] >> shifts & 1).flatten(1)


def _add(logits: Tensor, start: int, added: TokenValues) -> None:
    """What belongs to another rank's token adds nothing."""
    local = added.token_ids - start
    here = (local >= 0) & (local < logits.shape[1])
    values = torch.where(here, added.values.to(logits.dtype), 0)
    logits.index_put_((added.rows, local.clamp(0, logits.shape[1] - 1)), values, accumulate=True)


def _forbidden(words: BadWords, context: Context) -> TokenValues:
    """-infinity for the last token of a word whose other tokens end the output, 0 for the others."""
    width = words.prefixes.shape[1]
    lengths = context.lengths[words.rows]
    ends = lengths[:, None] + torch.arange(-width, 0, device=lengths.device)  # [W, P]
    recent = context.tokens[words.rows[:, None], ends.clamp(0, context.tokens.shape[1] - 1)]
    matches = ((recent == words.prefixes) | (words.prefixes < 0)).all(-1)
    matches &= lengths - words.lengths >= context.prompt_lengths[words.rows]
    values = torch.zeros(len(matches), device=lengths.device).masked_fill_(matches, -torch.inf)
    return TokenValues(words.rows, words.last_tokens, values)


def _penalize(logits: Tensor, start: int, penalties: Penalties, context: Context) -> None:
    """Repetition as in Keskar et al. 2019 (CTRL), over prompt and output; frequency and presence over the output."""
    tokens, lengths = context.tokens[penalties.rows], context.lengths[penalties.rows]
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    local = tokens - start
    here = (positions < lengths[:, None]) & (local >= 0) & (local < logits.shape[1])
    generated = here & (positions >= context.prompt_lengths[penalties.rows][:, None])
    index = local.clamp(0, logits.shape[1] - 1)
    own = logits[penalties.rows]
    seen = torch.zeros_like(own).scatter_add_(1, index, here.to(own.dtype)) > 0
    counts = torch.zeros_like(own).scatter_add_(1, index, generated.to(own.dtype))
    repetition = penalties.repetition.to(own.dtype)
    own = torch.where(seen, torch.where(own > 0, own / repetition, own * repetition), own)
    own -= penalties.frequency.to(own.dtype) * counts + penalties.presence.to(own.dtype) * (counts > 0)
    logits[penalties.rows] = own
