"""Histograms: what a quantile read from them is worth. The oracle sorts the values."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.histogram import LONG_S, SHORT_S, Histogram, width


def read_quantile(histogram: Histogram, quantile: float) -> float:
    """As Prometheus' histogram_quantile does: linear inside the bucket where the rank falls."""
    counts, bounds = histogram.counts, (0.0, *histogram.bounds)
    rank, below = quantile * sum(counts), 0.0
    for index, count in enumerate(counts):
        if below + count >= rank and count:
            if index == len(histogram.bounds):
                return histogram.bounds[-1]
            return bounds[index] + (bounds[index + 1] - bounds[index]) * (rank - below) / count
        below += count
    return math.nan


@pytest.mark.parametrize("bounds", [SHORT_S, LONG_S])
@given(data=st.data())
def test_a_quantile_is_off_by_less_than_its_bucket(bounds: tuple[float, ...], data: st.DataObject) -> None:
    """Wherever the values lie: buckets chosen for one speed make the p99 of another wrong."""
    # The least bound itself belongs to the bucket below it, which begins at 0.
    exponents = st.floats(math.log10(bounds[0]) + 0.01, math.log10(bounds[-1]) - 0.01)
    values = sorted(10**exponent for exponent in data.draw(st.lists(exponents, min_size=1, max_size=200)))
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    for quantile in (0.5, 0.9, 0.99):
        exact = values[math.ceil(quantile * len(values)) - 1]
        assert exact / 1.7 <= read_quantile(histogram, quantile) <= exact * 1.7


@given(st.lists(st.floats(0, 2000, allow_nan=False)))
def test_every_value_is_in_one_bucket(values: list[float]) -> None:
    """A bound belongs to the bucket below it, as `le` says; the last bucket takes what is above all."""
    histogram = Histogram((1.0, 10.0, 100.0))
    for value in values:
        histogram.observe(value)
    bounds = (-1.0, 1.0, 10.0, 100.0, math.inf)
    expected = [sum(low < value <= high for value in values) for low, high in pairwise(bounds)]
    assert histogram.counts == expected
    assert math.isclose(histogram.sum, sum(values))


def test_cells_of_another_are_counted_in() -> None:
    cells = memoryview(bytearray(8 * width((1.0, 2.0)))).cast("d")
    histogram = Histogram((1.0, 2.0), cells)
    histogram.observe(1.5)
    assert cells.tolist() == [0.0, 1.0, 0.0, 1.5]
