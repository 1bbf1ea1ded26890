"""When who is refused should come again, and who has waited too long: the rules alone, told the time."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.queue_clock import LATEST_S, SOONEST_S, QueueClock


def finishing(every: float, live: int, seconds: float = 60.0) -> QueueClock:
    """A clock at `seconds` of a service in which a sequence ends at such intervals, and another one comes."""
    clock = QueueClock(None)
    for key in range(live):
        clock.submitted(key, 0.0, waits=True)
    for number in range(1, round(seconds / every) + 1):
        clock.ended(number * every)
        clock.submitted(live + number, number * every, waits=True)
    return clock


@pytest.mark.parametrize("every", [0.25, 1.0])
def test_the_refused_come_back_as_fast_as_places_get_free(every: float) -> None:
    clock = finishing(every, live=20)
    hints = [clock.retry_after_ms(60.0) / 1e3 for _ in range(5)]
    for number, hint in enumerate(hints, 1):
        assert hint == pytest.approx(number * every, rel=0.3), "one place each"
    for number in range(5):
        clock.ended(60.0 + (number + 1) * every)
    assert clock.retry_after_ms(60.0 + 5 * every) / 1e3 == pytest.approx(every, rel=0.3), "those places are taken"


def test_of_many_who_are_refused_no_crowd_comes_back_at_once() -> None:
    clock = finishing(0.25, live=4000)
    hints = [clock.retry_after_ms(60.0) / 1e3 for _ in range(5000)]
    by_second = Counter(int(hint) for hint in hints)
    assert max(by_second.values()) < 1.5 * len(hints) / LATEST_S


@pytest.mark.parametrize("every", [0.5, 3.0])
def test_nobody_is_told_to_come_when_all_that_live_now_will_be_over(every: float) -> None:
    """However many were refused before, and never came back."""
    hints = [clock.retry_after_ms(60.0) / 1e3 for clock in [finishing(every, live=6)] for _ in range(100)]
    assert max(hints) == pytest.approx(6 * every, rel=0.3)
    assert max(Counter(hints).values()) <= 1 + len(hints) / 5, "they are spread still"


def test_a_service_that_was_idle_is_no_slower_for_it_and_has_forgotten_its_places() -> None:
    clock = finishing(0.5, live=6)
    hints = [clock.retry_after_ms(60.0) for _ in range(4)]
    for _ in range(6):
        clock.ended(60.1)
    for key in range(6):
        clock.submitted(key, 60.1, waits=True)
    assert clock.retry_after_ms(60.1) < hints[1], "nobody has a place in a queue that was empty"
    for _ in range(6):
        clock.ended(60.2)
    for key in range(6):
        clock.submitted(key, 600.0, waits=True)
    assert clock.retry_after_ms(600.0) < hints[1], "half a second each, as before"


def test_what_a_start_takes_says_nothing_of_the_rate() -> None:
    clock = QueueClock(None)
    for key in range(6):
        clock.submitted(key, 0.0, waits=True)
    clock.ended(300.0)
    clock.ended(300.2)
    assert clock.retry_after_ms(300.2) < 1e3


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1e5)), max_size=50))
def test_a_hint_keeps_its_bounds(events: list[tuple[bool, float]]) -> None:
    clock, now = QueueClock(None), 0.0
    for key in range(len(events) + 1):
        clock.submitted(key, now, waits=True)
    for is_end, later in events:
        now += later
        if is_end:
            clock.ended(now)
        else:
            assert SOONEST_S * 1e3 <= clock.retry_after_ms(now) <= LATEST_S * 1e3


def test_who_waits_too_long_is_told_once_in_the_order_of_arrival() -> None:
    clock = QueueClock(5.0)
    for key in (3, 1, 2):
        clock.submitted(key, float(key == 2), waits=True)
    assert clock.late(4.9) == []
    assert clock.late(5.5) == [3, 1]
    clock.submitted(4, 6.0, waits=False)
    assert clock.late(100.0) == [2] and clock.late(200.0) == []
    unbounded = QueueClock(None)
    unbounded.submitted(1, 0.0, waits=True)
    assert unbounded.late(1e9) == []
