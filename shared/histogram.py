"""A histogram in plain numbers, cheap enough for every step and token. Knows nothing of who reads it.

A quantile is read from buckets by interpolation, so it is wrong by at most the width of one bucket: the bounds of a
`ladder` lie so close that this is less than two thirds, from the least to the most that is worth telling apart.
"""

from bisect import bisect_left

RUNGS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)


def ladder(least_exponent: int, most_exponent: int) -> tuple[float, ...]:
    """Six bounds a decade, from 10 ** least_exponent to 10 ** most_exponent."""
    bounds = [float(f"{rung}e{exponent}") for exponent in range(least_exponent, most_exponent) for rung in RUNGS]
    return (*bounds, float(f"1e{most_exponent}"))


def doublings(least: int, most: int) -> tuple[float, ...]:
    """2 ** least, 2 ** (least + 1) ... 2 ** most."""
    return tuple(float(1 << exponent) for exponent in range(least, most + 1))


SHORT_S = ladder(-4, 1)
"""Seconds between tokens and of steps: 100 microseconds to 10 s."""
LONG_S = ladder(-3, 3)
"""Seconds of a request: 1 ms to 1,000 s."""
SIZES = doublings(5, 20)
"""Bytes of a plan or a result: 32 to 1 MiB, which a plan stays under."""
TOKENS = doublings(0, 17)
"""Tokens of a request: 1 to 131,072."""
ROWS = doublings(0, 10)
"""Rows of a step: 1 to 1,024."""


class Histogram:
    """Counts of values by bucket, and their sum."""

    def __init__(self, bounds: tuple[float, ...], cells: "memoryview[float] | None" = None) -> None:
        """`bounds` ascend; a value above the last has a bucket of its own. `cells`: `width(bounds)` zeros to count
        in, where others shall read them."""
        self.bounds = bounds
        self._cells: memoryview[float] | list[float] = [0.0] * width(bounds) if cells is None else cells

    def observe(self, value: float) -> None:
        """One more value."""
        self._cells[bisect_left(self.bounds, value)] += 1
        self._cells[-1] += value

    @property
    def counts(self) -> list[float]:
        """How many values were at most each bound and above the one before it; at last, how many above all."""
        return list(self._cells[: len(self.bounds) + 1])

    @property
    def sum(self) -> float:
        """Of all values."""
        return self._cells[-1]


def width(bounds: tuple[float, ...]) -> int:
    """Cells of a histogram with these bounds."""
    return len(bounds) + 2
