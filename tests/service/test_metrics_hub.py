"""Sums over processes that come and go: no count falls, vanishes or doubles. The oracle keeps one list of all."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import Metric

from scheduler_svc.metrics_hub import MetricsHub
from scheduler_svc.snapshots import decode, encode, metrics, push, take
from shared.histogram import Histogram
from shared.metrics import counter, gauge, histogram
from tests.patience import PATIENCE_S

LIVES = st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.booleans()), max_size=8)
"""Of each process: what it counted between its snapshots, and whether it is dead by now."""


def told(total: int, values: list[float]) -> list[Metric]:
    filled = Histogram((1.0, 5.0))
    for value in values:
        filled.observe(value)
    return [
        counter("c", "Counts.", {"x": total, "y": 0}, "kind"),
        gauge("g", "Now.", 3),
        histogram("h", "Values.", filled),
    ]


def samples(hub: MetricsHub) -> dict[str, float]:
    return {
        sample.name + "".join(sample.labels.values()): sample.value
        for metric in hub.read()
        for sample in metric.samples
    }


@given(LIVES)
def test_counts_of_the_dead_stay(lives: list[tuple[list[int], bool]]) -> None:
    hub, counted, living = MetricsHub(), 0, 0
    seen = [0.0]
    for steps, dies in lives:
        child, values = hub.opened(), []
        for step in steps:
            counted += step
            values.append(float(step))
            hub.told(child, take(told(sum(map(int, values)), values)))
            seen.append(samples(hub)["c_totalx"])
            assert seen[-1] == counted
        if dies:
            hub.closed(child)
            seen.append(samples(hub)["c_totalx"])
        else:
            living += 1
    assert seen == sorted(seen)
    if lives:
        everything = [step for steps, _ in lives for step in steps]
        now = samples(hub)
        assert now["h_count"] == now["h_bucket+Inf"] == len(everything)
        assert now["h_sum"] == sum(everything)
        assert now["h_bucket1.0"] == sum(step <= 1 for step in everything)
        assert now.get("g", 0.0) == 3 * living, "a gauge is the living ones'"


def test_a_child_that_dies_before_its_first_word() -> None:
    hub = MetricsHub()
    hub.closed(hub.opened())
    assert samples(hub) == {}


def test_a_snapshot_travels_whole() -> None:
    snapshot = take(told(7, [0.5, 2.0, 100.0]))
    assert take(metrics(decode(encode(snapshot)))) == snapshot


def test_the_last_counts_arrive_when_a_process_stops(tmp_path: Path) -> None:
    """It counts on after its last regular snapshot."""
    counted = [0]

    def read() -> Iterator[Metric]:
        yield counter("c", "Counts.", counted[0])

    async def scenario() -> None:
        hub = MetricsHub()
        async with await hub.serve(str(tmp_path / "s")):
            pushing = asyncio.create_task(push(tmp_path / "s", read))
            while not samples(hub):
                await asyncio.sleep(0.01)
            counted[0] = 5
            pushing.cancel()
            await asyncio.wait([pushing])
            while samples(hub)["c_total"] != 5:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_a_metric_that_fails_ends_the_metrics_alone(tmp_path: Path) -> None:
    def read() -> Iterator[Metric]:
        raise ZeroDivisionError
        yield

    async def scenario() -> None:
        async with await MetricsHub().serve(str(tmp_path / "s")):
            await push(tmp_path / "s", read)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
