"""How long and how often a lost stream is tried again: the rules alone, told the time."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import DeadlineExceeded, DuplicateRequest, QueueFull, Standby, TandemError, Unavailable
from tandem.resume import LONGEST_HINT_S, LONGEST_PAUSE_S, Patience

LOST = Unavailable("gone")


@given(limit=st.floats(0.5, 100), jitter=st.floats(0, 1), slow=st.floats(0, 5))
def test_attempts_come_ever_more_rarely_and_end_with_the_limit(limit: float, jitter: float, slow: float) -> None:
    """`slow`: how long each attempt takes to fail."""
    patience, now, pauses = Patience(0.0, limit, None, endpoints=1), 50.0, []
    patience.progressed()
    with pytest.raises(Unavailable):
        while True:
            pauses.append(patience.pause_after(LOST, now, jitter))
            now += pauses[-1] + slow
    assert pauses == sorted(pauses) and pauses[0] > 0 and max(pauses) <= LONGEST_PAUSE_S
    assert limit <= now - 50.0 <= limit + LONGEST_PAUSE_S + slow


def test_progress_begins_the_count_anew() -> None:
    """A wait in a queue is no loss: the limit counts from the loss."""
    patience = Patience(0.0, 10.0, None, endpoints=1)
    patience.accepted()
    for loss in range(5):
        now = 1000.0 * (loss + 1)
        assert patience.pause_after(LOST, now, 1.0) == pytest.approx(0.05)
        patience.pause_after(LOST, now + 9.9, 1.0)
        patience.progressed()


def test_without_acceptance_every_endpoint_is_tried_once() -> None:
    patience = Patience(0.0, 60.0, None, endpoints=3)
    assert [patience.pause_after(LOST, 0.0, 0.0) for _ in range(2)] == [0.0, 0.0]
    with pytest.raises(Unavailable):
        patience.pause_after(LOST, 0.0, 0.0)
    with pytest.raises(QueueFull):
        Patience(0.0, 60.0, None, endpoints=3).pause_after(QueueFull("full", 5), 0.0, 0.0)


@pytest.mark.parametrize("error", [QueueFull("full", 5), DuplicateRequest("live")])
def test_a_refusal_without_a_loss_is_the_callers(error: TandemError) -> None:
    patience = Patience(0.0, 60.0, None, endpoints=1)
    patience.accepted()
    with pytest.raises(type(error)):
        patience.pause_after(error, 0.0, 0.0)


def test_after_a_loss_a_full_queue_says_when() -> None:
    patience = Patience(0.0, 60.0, None, endpoints=1)
    patience.progressed()
    patience.pause_after(LOST, 0.5, 0.0)
    assert patience.pause_after(QueueFull("full", 1500), 1.0, 0.0) == 1.5


def test_a_full_queue_is_asked_again_when_it_says_until_the_queue_timeout() -> None:
    patience = Patience(0.0, 60.0, None, endpoints=2, queue_timeout=10.0)
    patience.accepted()
    full = QueueFull("full", 4000)
    assert patience.pause_after(full, 0.0, 1.0) == 0.0, "another endpoint was not asked yet"
    assert patience.pause_after(full, 0.0, 0.0) == 4.0
    assert patience.pause_after(full, 4.0, 1.0) == 5.0
    assert 0.0 < patience.pause_after(full, 9.0, 1.0) < 1.0
    with pytest.raises(QueueFull):
        patience.pause_after(full, 10.0, 1.0)


@given(timeout=st.floats(0.5, LONGEST_HINT_S - 1), jitters=st.lists(st.floats(0, 1), min_size=20, max_size=20))
def test_a_hint_beyond_the_queue_timeout_is_not_waited_out(timeout: float, jitters: list[float]) -> None:
    """It is asked again well before the end, and ever more often towards it; where, is each one's jitter."""
    patience, now, asked = Patience(0.0, 60.0, None, endpoints=1, queue_timeout=timeout), 0.0, []
    with pytest.raises(QueueFull):
        for jitter in jitters:
            now += patience.pause_after(QueueFull("full", 1 << 30), now, jitter)
            asked.append(now)
    assert asked[0] == pytest.approx(timeout * (0.5 + jitters[0] / 4))
    assert timeout * 0.75 < asked[-1] < timeout and len(asked) < 15


@given(hint=st.integers(1, 1 << 31), jitter=st.floats(0, 1))
def test_a_hint_is_never_undercut_nor_believed_without_bound(hint: int, jitter: float) -> None:
    patience = Patience(0.0, 60.0, None, endpoints=1, queue_timeout=1e9)
    pause = patience.pause_after(QueueFull("full", hint), 0.0, jitter)
    assert min(hint / 1e3, LONGEST_HINT_S) <= pause <= LONGEST_HINT_S * 1.25


@pytest.mark.parametrize("error", [LOST, QueueFull("full", 10)])
def test_no_pause_reaches_beyond_the_deadline(error: TandemError) -> None:
    patience = Patience(0.0, 60.0, 5.0, endpoints=1)
    patience.progressed()
    assert patience.remaining(2.0) == 3.0 and patience.remaining(7.0) == 0.0
    patience.pause_after(LOST, 4.0, 0.0)
    with pytest.raises(DeadlineExceeded, match=str(error)):
        patience.pause_after(error, 4.999, 1.0)


def test_where_a_scheduler_stands_by_another_is_waited_for() -> None:
    """Also by a request that nobody has taken yet, and whatever the others say; for as long as after a loss."""
    patience, standby = Patience(0.0, 10.0, None, endpoints=2), Standby("stands by", "")
    assert patience.pause_after(standby, 0.0, 1.0) == 0.0
    now, pauses = 0.0, []
    with pytest.raises(Unavailable):
        for error in itertools.cycle([LOST, standby]):
            pauses.append(patience.pause_after(error, now, 1.0))
            now += pauses[-1]
    assert pauses[0] == pytest.approx(0.05) and pauses == sorted(pauses)
    assert 10.0 <= now <= 10.0 + LONGEST_PAUSE_S
