"""Clients take turns: what each is served while it waits, against the bound that start-time fair queueing promises."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core import turns
from scheduler_svc.core.request import MOST_OUTPUT_COUNTED
from tests.core.simulation import Simulation, make_simulation

Asked = tuple[str, int, int, int]
"""Client, priority, tokens of the prompt, max_tokens."""

ASKED = st.tuples(st.sampled_from("abc"), st.integers(0, 1), st.integers(1, 8), st.integers(1, 6))


def one_at_a_time() -> Simulation:
    """A machine with one slot, which is taken: whoever comes now waits."""
    simulation = make_simulation(max_num_seqs=1, max_model_length=16)
    simulation.submit((1,), max_tokens=2, priority=-1)
    simulation.plan(0)
    return simulation


def submit(simulation: Simulation, asked: Asked) -> int:
    client, priority, prompt, most = asked
    return simulation.submit((1,) * prompt, client=client, priority=priority, max_tokens=most)


def order(simulation: Simulation) -> list[int]:
    """The keys of those that wait, in the order in which they begin."""
    waiting, begun = sorted(simulation.jobs), []
    while simulation.jobs:
        simulation.step()
        begun += [key for key in waiting if key not in begun and simulation.core._life.by_key.get(key) is None]
    return begun[1:]


@given(st.lists(ASKED, max_size=15))
def test_no_client_is_served_much_more_than_another_that_waits(requests: list[Asked]) -> None:
    """Goyal's theorem 1: between two clients that both wait all the time, the tokens served differ by at most the
    longest request of each. Here for every stretch of the order in which requests begin."""
    simulation = one_at_a_time()
    keys = {submit(simulation, asked): asked for asked in requests}
    begun = order(simulation)
    assert sorted(begun) == sorted(keys)
    assert [keys[key][1] for key in begun] == sorted(asked[1] for asked in keys.values()), "priority first"
    for client in "abc":
        for priority in (0, 1):
            own = [key for key in begun if keys[key][:2] == (client, priority)]
            assert own == sorted(own), "a client's own in the order of their arrival"
    for priority in (0, 1):
        _check_stretches([keys[key] for key in begun if keys[key][1] == priority])


def _check_stretches(begun: list[Asked]) -> None:
    longest = {client: max((cost(asked) for asked in begun if asked[0] == client), default=0) for client in "abc"}
    for start in range(len(begun)):
        served: Counter[str] = Counter()
        for at in range(start, len(begun)):
            waiting = {asked[0] for asked in begun[at:]}
            for one in waiting:
                for other in waiting:
                    assert abs(served[one] - served[other]) <= longest[one] + longest[other]
            served[begun[at][0]] += cost(begun[at])


def cost(asked: Asked) -> int:
    _, _, prompt, most = asked
    return min(prompt + min(most, MOST_OUTPUT_COUNTED), 16)


def test_who_comes_late_waits_for_one_turn_and_has_saved_up_none() -> None:
    simulation = one_at_a_time()
    flood = [submit(simulation, ("a", 0, 4, 2)) for _ in range(7)]
    while simulation.core.load().queued > 4:
        simulation.step()
    few = [submit(simulation, ("b", 0, 4, 2)) for _ in range(2)]
    assert order(simulation)[-6:] == [few[0], flood[3], few[1], *flood[4:]]


@pytest.mark.parametrize("waiting", [0, 1])
def test_who_comes_back_is_ahead_of_who_came_later(waiting: int) -> None:
    """Also where nobody of its priority had waited meanwhile."""
    simulation = one_at_a_time()
    flood = [submit(simulation, ("a", 0, 4, 2)) for _ in range(2 + waiting)]
    while simulation.core.load().queued > waiting:
        simulation.step()
    other = submit(simulation, ("b", 0, 4, 2))
    simulation.lose(0, restart=True)
    simulation.open(0)
    assert [sequence.request.key for sequence in simulation.core._life.queue] == [flood[1], other, *flood[2:]]
    simulation.settle()


def test_without_clients_the_first_comes_first() -> None:
    simulation = one_at_a_time()
    keys = [simulation.submit((1,) * length, max_tokens=1) for length in (8, 1, 5, 2)]
    assert order(simulation) == keys


def test_clients_without_number_cost_no_memory_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MOST_CLIENTS", 4)
    given = turns.Turns()
    given.join(0)
    for number in range(100):
        given.take(0, f"client {number}", 10)
    (level,) = given._levels.values()
    assert list(level.following) == [f"client {number}" for number in range(96, 100)]
    given.leave(0)
    assert not given._levels
