"""What one step gave, as read from the core's message: checked as a whole before any sample is told of it.

Knows nothing of samples. A core that sends what is none of this is broken: its successor is given what lives.
"""

from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from shared.errors import ProtocolError
from shared.pb import core_pb2
from shared.wire import unpack

_LITTLE_UINT32 = np.dtype("<u4")


class Token(NamedTuple):
    """One sampled token."""

    handle: int
    """Whose it is."""
    token_id: int
    logprobs: bytes
    """An entry (shared.logprobs); no bytes where it was not asked for."""


def read_tokens(batch: core_pb2.TokenBatch, vocabulary_size: int) -> list[Token]:
    """In the order of the batch. Raises ProtocolError where its lists don't fit together."""
    try:
        handles, token_ids = np.frombuffer(batch.handles, _LITTLE_UINT32), unpack(batch.token_ids)
        if token_ids.size and not 0 <= token_ids.min() <= token_ids.max() < vocabulary_size:
            raise ValueError("a token is not within the vocabulary")
        columns = handles.tolist(), token_ids.tolist(), _entries(batch, token_ids.size)
        return [Token(*row) for row in zip(*columns, strict=True)]
    except ValueError as error:
        raise ProtocolError(f"a batch of tokens is none: {error}") from None


def _entries(batch: core_pb2.TokenBatch, num_tokens: int) -> list[bytes]:
    """Of each token its logprobs, no bytes where they were not asked for."""
    if not batch.logprob_sizes:
        return [b""] * num_tokens
    sizes = unpack(batch.logprob_sizes)
    if (sizes < 0).any() or int(sizes.sum(dtype=np.int64)) != len(batch.logprobs):
        raise ValueError(f"{len(batch.logprobs)} bytes of logprobs are not what its tokens have")
    return [batch.logprobs[start:end] for start, end in pairwise([0, *accumulate(sizes.tolist())])]
