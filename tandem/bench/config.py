"""The settings of `tandem bench`, which the command line reads without what measures."""

from dataclasses import dataclass

from shared.settings import check_bounds


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What to offer."""

    num_prompts: int = 100
    """Requests of each point."""
    input_len: int = 128
    """Tokens of a prompt."""
    output_len: int = 128
    """Tokens of an output; end-of-sequence tokens don't end it."""
    range_ratio: float = 0.0
    """Lengths are uniform within (1 - this) to (1 + this) of those two, 0 up to 1."""
    max_concurrency: int | None = None
    """Most requests at a time; unset: no limit."""
    clients: int = 4
    """Client processes."""
    seed: int = 0
    """Of prompts, lengths and arrivals."""
    ttft_goal: float = 500.0
    """Goodput: most milliseconds to the first token."""
    tpot_goal: float = 50.0
    """Goodput: most milliseconds per further token, mean of a request."""

    def __post_init__(self) -> None:
        """Raises StartupError for a value out of range."""
        check_bounds(self, ("num_prompts", "input_len", "output_len", "max_concurrency", "clients"), 1)
        check_bounds(self, ("range_ratio",), 0, 1)
        check_bounds(self, ("ttft_goal", "tpot_goal"), 0)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return sum(round(length * (1 + self.range_ratio)) for length in (self.input_len, self.output_len))
