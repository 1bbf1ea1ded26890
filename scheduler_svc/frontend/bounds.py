"""How a field of a request is refused: by its name, with its bound and the value that is not within it."""

from collections.abc import Sequence

import numpy as np

from shared.errors import InvalidRequest
from shared.types import NO_INTS, IntArray


def within(field: str, value: float, low: float, high: float, unit: str = "") -> None:
    """Raises InvalidRequest. NaN is within nothing."""
    if not low <= value <= high:
        raise InvalidRequest(field, f"must be within [{low}, {high}]{unit}, is {value}")


def at_most(field: str, size: int, limit: int, unit: str) -> None:
    """Raises InvalidRequest for a list or text that is too long."""
    if size > limit:
        raise InvalidRequest(field, f"has {size} {unit}; at most {limit} are allowed")


def checked_ids(field: str, ids: Sequence[int], vocabulary_size: int) -> IntArray:
    """Token ids of a request, [num_ids]. Raises InvalidRequest naming the first that is not in the vocabulary."""
    if not ids:
        return NO_INTS
    values = np.array(ids, dtype=np.int64)
    outside = np.flatnonzero((values < 0) | (values >= vocabulary_size))
    if outside.size:
        index = int(outside[0])
        raise InvalidRequest(f"{field}[{index}]", f"must be within [0, {vocabulary_size}), is {values[index]}")
    return values.astype(np.int32)
