"""The settings of `tandem batch`, which the command line reads without what computes a batch."""

from dataclasses import dataclass

from shared.settings import check_bounds


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """How to compute a batch."""

    max_concurrency: int = 64
    """Requests at a time."""
    timeout: float | None = None
    """Seconds for one request; then its line has status 504. Unset: no limit."""

    def __post_init__(self) -> None:
        """Raises StartupError for a value out of range."""
        check_bounds(self, ("max_concurrency",), 1)
        check_bounds(self, ("timeout",), 0)
