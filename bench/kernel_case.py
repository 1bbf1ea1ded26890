"""What bench.kernels measures: a kernel at one shape."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

Call: TypeAlias = Callable[[bool], object]


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one shape."""

    kernel: str
    model: str
    batch: int
    context: int
    """Tokens that a row attends to, the mean where they differ; 0 where that does not matter."""
    bytes: int
    """That one call must read and write."""
    make: Callable[[], Call]
    """Fresh random inputs and a call on them, which takes whether to use programmatic dependent launch."""
