"""Every step finds a bucket that holds it and wastes little of it, whatever the limits are."""

from hypothesis import given
from hypothesis import strategies as st

from worker_svc.runner.buckets import mixed_buckets, mixed_rows, row_buckets, smallest, token_buckets


@given(st.integers(1, 3000), st.data())
def test_rows(most: int, data: st.DataObject) -> None:
    buckets = row_buckets(most)
    rows = data.draw(st.integers(1, most))
    assert buckets == sorted(set(buckets)) and buckets[-1] == most
    assert rows <= smallest(buckets, rows) <= max(1.25 * rows, rows + 7)


@given(st.integers(1, 70_000), st.integers(1, 2000), st.data())
def test_mixed(most_tokens: int, most_rows: int, data: st.DataObject) -> None:
    tokens, rows = data.draw(st.integers(1, most_tokens)), data.draw(st.integers(1, most_rows))
    buckets = mixed_buckets(most_tokens, most_rows)
    assert len(buckets) <= 2 * len(token_buckets(most_tokens))
    size, count = next(bucket for bucket in buckets if bucket[0] >= tokens and bucket[1] >= rows)
    assert tokens <= size <= max(1.25 * tokens, tokens + 16)
    assert count in mixed_rows(most_rows), "sampling has a graph for it"
