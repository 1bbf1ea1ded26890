"""The scheduler may die, all of it: a client's streams go on when another listens on its port.

The oracle is the undisturbed run, in float64. Everything is killed with the signal that no process can catch.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem import Client
from tests.service.schedulers import Disturbance, Scheduler, all_at_once, expected, joined, running_worker
from tests.service.tandem_process import running


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scheduler]:
    log = tmp_path_factory.mktemp("resume") / "log"
    with running_worker(log) as worker:
        scheduler = Scheduler(worker.endpoint, log)
        try:
            scheduler.ready()
            yield scheduler
        finally:
            scheduler.kill()


def test_streams_survive_the_death_of_the_scheduler(scheduler: Scheduler) -> None:
    undisturbed = expected(scheduler.endpoint)
    disturbance = Disturbance(scheduler.kill_and_restart, after=200)
    assert asyncio.run(all_at_once(scheduler.endpoint, disturbance.count)) == undisturbed
    disturbance.done()
    scheduler.ready()


def test_a_stream_without_a_seed_survives_too(scheduler: Scheduler) -> None:
    """The client chose one; given again, it repeats the whole."""
    options: dict[str, Any] = {"max_tokens": 150, "temperature": 1.0, "ignore_eos": True}
    disturbance = Disturbance(scheduler.kill_and_restart, after=20)
    with Client(scheduler.endpoint) as client:
        deltas, stream = [], client.generate("It is a truth", **options)
        for delta in stream:
            deltas.append(delta)
            disturbance.count(delta)
        disturbance.done()
        scheduler.ready()
        ((text, token_ids, finish, usage, *_),) = joined(deltas)
        again = client.complete("It is a truth", seed=stream.seed, **options).samples[0]
    assert (text, token_ids, finish) == (again.text, list(again.token_ids), again.finish)
    assert usage.completion_tokens == len(token_ids) == 150


def test_a_stream_moves_to_another_scheduler(scheduler: Scheduler, tmp_path: Path) -> None:
    """Its own does not come back meanwhile. The other one has a worker of its own, and the same model."""
    options: dict[str, Any] = {"max_tokens": 150, "temperature": 1.0, "seed": 8, "ignore_eos": True}
    with running(tmp_path / "log", "--dtype", "float64", "--kv-cache-memory", "64") as other:
        with Client(other.endpoint) as client:
            undisturbed = client.complete("It is a truth", **options).samples[0]
        disturbance = Disturbance(scheduler.kill, after=20)
        with Client([scheduler.endpoint, other.endpoint]) as client:
            deltas = []
            for delta in client.generate("It is a truth", **options):
                deltas.append(delta)
                disturbance.count(delta)
        disturbance.done()
        scheduler.start()
        scheduler.ready()
    ((text, token_ids, finish, *_),) = joined(deltas)
    assert (text, token_ids, finish) == (undisturbed.text, list(undisturbed.token_ids), undisturbed.finish)
