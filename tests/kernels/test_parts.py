"""Rows are cut into parts that cover them once, the longest part first."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import ints
from worker_svc.kernels.parts import MAX_SPLITS, UNIT, Parts, cut_rows, most_parts


def cut(lengths: list[int], kv_heads: int) -> Parts:
    """Row r has table 2 r + 1."""
    tables = [2 * row + 1 if length else -1 for row, length in enumerate(lengths)]
    return cut_rows(ints(tables), ints([length for own in lengths for length in (77, own)]), kv_heads)


def rows_of(parts: Parts) -> list[list[int]]:
    """Row, table row, first token, end, first part, number of parts; of those that are parts."""
    table: list[list[int]] = parts.table[:, :6].tolist()
    used = [part for part in table if part[0] >= 0]
    assert table[: len(used)] == used
    return used


@settings(max_examples=25)
@given(st.lists(st.integers(0, 3000) | st.just(40_000), min_size=1, max_size=12), st.sampled_from([1, 8, 512]))
def test_parts_cover_each_row_once(lengths: list[int], kv_heads: int) -> None:
    parts = cut(lengths, kv_heads)
    used = rows_of(parts)
    assert len(parts.table) == len(parts.arrived) == most_parts(len(lengths), kv_heads)
    assert not parts.arrived.any()
    for row, length in enumerate(lengths):
        first = next(index for index, part in enumerate(used) if part[0] == row)
        count = used[first][5]
        own = used[first : first + count]
        assert sum(part[0] == row for part in used) == count <= MAX_SPLITS
        assert all(
            (part[0], part[1], part[4], part[5]) == (row, 2 * row + 1 if length else -1, first, count) for part in own
        )
        bounds = [part[2] for part in own] + [length]
        assert bounds[0] == 0 and [part[3] for part in own] == bounds[1:]
        assert all(start % UNIT == 0 and start < end for start, end in itertools.pairwise(bounds) if length)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 3000) | st.just(40_000), min_size=1, max_size=12), st.sampled_from([1, 8, 512]))
def test_no_row_starts_before_a_longer_one(lengths: list[int], kv_heads: int) -> None:
    firsts = [part for part in rows_of(cut(lengths, kv_heads)) if part[2] == 0]
    keys = [(-max(math.ceil(end / UNIT), 1), row) for row, _, _, end, *_ in firsts]
    assert keys == sorted(keys)


@pytest.mark.parametrize("rows", [31, 300])
def test_equal_rows_stay_whole_and_in_order(rows: int) -> None:
    parts = rows_of(cut([850] * rows, 512))
    assert [part[0] for part in parts] == list(range(rows))


def test_a_row_much_longer_than_the_others_is_cut_first() -> None:
    parts = rows_of(cut([400] * 255 + [32_000], 8))
    count = len(parts) - 255
    assert 16 < count <= MAX_SPLITS
    assert [part[0] for part in parts] == [255] * count + list(range(255))
