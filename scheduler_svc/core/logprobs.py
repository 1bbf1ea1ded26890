"""Logprobs on their way from a step's result to the callers: opaque bytes, never looked into, token by token or not."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.request import Sequence
from shared.logprobs import entry_bytes
from shared.types import NO_INTS, IntArray


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Entries of tokens, in the order of the tokens."""

    sizes: IntArray = field(default_factory=lambda: NO_INTS)
    """[num_tokens]: bytes of each token's entry, 0 where it has none; empty where no token has one."""
    entries: bytes = b""
    """All entries, joined."""

    def select(self, chosen: NDArray[np.bool_]) -> "TokenLogprobs":
        """Those of some of the tokens, [num_tokens]."""
        if not self.sizes.size:
            return self
        kept = np.frombuffer(self.entries, dtype=np.uint8)[np.repeat(chosen, self.sizes)]
        return TokenLogprobs(self.sizes[chosen], kept.tobytes())


NO_LOGPROBS = TokenLogprobs()


class PromptRow(NamedTuple):
    """A row of a plan whose result brings logprobs of prompt tokens."""

    sequence: Sequence
    slot: int
    generation: int
    """Of the slot when the row was planned."""
    begin: int
    """Positions of the prompt: the first,"""
    end: int
    """and the one after the last."""

    @property
    def size(self) -> int:
        """Bytes of its entries."""
        return (self.end - self.begin) * entry_bytes(self.sequence.request.prompt_logprobs)


def prompt_row(sequence: Sequence, generation: int, start: int, count: int) -> PromptRow | None:
    """Of a row of `count` tokens from position `start` on; None where its logprobs were not asked for, or are known."""
    begin = max(start, sequence.prompt_logprobs_from)
    end = min(start + count, len(sequence.request.prompt))
    return PromptRow(sequence, sequence.slot, generation, begin, end) if begin < end else None
