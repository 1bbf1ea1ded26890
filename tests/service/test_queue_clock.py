"""When who is refused should come again, and who has waited too long: the rules alone, told the time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.queue_clock import LATEST_S, SOONEST_S, QueueClock


def finishing(every: float, seconds: float = 60.0) -> QueueClock:
    """A clock at `seconds` of a service in which a sequence ends at such intervals."""
    clock = QueueClock(None)
    for number in range(round(seconds / every)):
        clock.ended(number * every)
    return clock


@pytest.mark.parametrize("every", [0.25, 1.0])
def test_the_refused_come_back_as_fast_as_places_get_free(every: float) -> None:
    clock = finishing(every)
    hints = [clock.retry_after_ms(60.0) / 1e3 for _ in range(5)]
    for number, hint in enumerate(hints, 1):
        assert hint == pytest.approx(number * every, rel=0.3), "one place each"
    for number in range(5):
        clock.ended(60.0 + (number + 1) * every)
    assert clock.retry_after_ms(60.0 + 5 * every) / 1e3 == pytest.approx(every, rel=0.3), "those places are taken"


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 100)), max_size=50))
def test_a_hint_keeps_its_bounds(events: list[tuple[bool, float]]) -> None:
    clock, now = QueueClock(None), 0.0
    for is_end, later in events:
        now += later
        if is_end:
            clock.ended(now)
        else:
            assert SOONEST_S * 1e3 <= clock.retry_after_ms(now) <= LATEST_S * 1e3


def test_who_waits_too_long_is_told_once_in_the_order_of_arrival() -> None:
    clock = QueueClock(5.0)
    for key in (3, 1, 2):
        clock.submitted(key, float(key == 2))
    assert clock.late(4.9) == []
    assert clock.late(5.5) == [3, 1]
    assert clock.late(100.0) == [2] and clock.late(200.0) == []
    unbounded = QueueClock(None)
    unbounded.submitted(1, 0.0)
    assert unbounded.late(1e9) == []
