"""One token's logprobs as bytes: the worker packs them, a frontend reads them, and who is between only carries them."""

import struct
from typing import NamedTuple

MOST_LOGPROBS = 20
"""Most likely tokens that can be had with each token."""

_HEAD = struct.Struct("<fi")
_ITEM = struct.Struct("<if")


class TokenEntry(NamedTuple):
    """How likely a token was, and what else was."""

    logprob: float
    """Natural logarithm of its probability."""
    rank: int
    """1 for the most likely token."""
    top: tuple[tuple[int, float], ...]
    """(token, its logprob), the most likely first."""


def entry_bytes(num_top: int | None) -> int:
    """Length of an entry that tells of `num_top` most likely tokens; 0 where there is none."""
    return 0 if num_top is None else _HEAD.size + num_top * _ITEM.size


def read_entry(data: bytes) -> TokenEntry:
    """One entry. Raises struct.error where it is none."""
    logprob, rank = _HEAD.unpack_from(data)
    return TokenEntry(logprob, rank, tuple(_ITEM.iter_unpack(data[_HEAD.size :])))
