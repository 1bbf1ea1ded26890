"""What a follower of the caches puts together is what is cached, whatever happens and whenever it begins."""

import itertools
from typing import Any

from scheduler_svc.cache_news import CacheReporter
from scheduler_svc.core import CacheChanges, HashedBlock
from shared.types import StepPlan
from tests.core.random_runs import random_run
from tests.core.simulation import PROMPTS, Simulation, make_simulation

LATEST_START = 20
EIGHT = PROMPTS[0][:8]


class Follower:
    """Believes what it is told, and nothing else."""

    def __init__(self) -> None:
        self.blocks: dict[int, dict[bytes, HashedBlock]] = {}

    def hear(self, news: CacheChanges) -> None:
        """Also checks that nothing is told twice."""
        if news.cleared:
            self.blocks[news.group] = {}
        held = self.blocks.setdefault(news.group, {})
        for change in news.changes:
            if isinstance(change, HashedBlock):
                assert change.digest not in held, "told twice"
                held[change.digest] = change
            else:
                del held[change]


class Followed(Simulation):
    """A follower begins at some plan, another one in each run, and hears the news at each one after it."""

    runs = itertools.count()

    def __init__(self, *arguments: Any) -> None:
        self.follower: Follower | None = None
        self.plans_before = next(Followed.runs) % LATEST_START
        super().__init__(*arguments)

    def _send(self, side: object, plan: StepPlan) -> None:
        super()._send(side, plan)  # type: ignore[arg-type]
        watch = self.core.cache_watch
        if self.follower is None:
            assert not watch.take(), "news though nobody watches"
            self.plans_before -= 1
            if self.plans_before < 0:
                self.follower = Follower()
                watch.watch(True)
                for news in watch.contents():
                    self.follower.hear(news)
        self.check()

    def check(self) -> None:
        """The follower knows what a prompt would find."""
        if self.follower is None:
            return
        for news in self.core.cache_watch.take():
            self.follower.hear(news)
        for number, group in self.core._groups.items():
            prefix = group.pool.prefix
            cached = {item.digest: item for item in prefix._item if item is not None}
            assert self.follower.blocks.get(number, {}) == cached
        gone = self.follower.blocks.keys() - self.core._groups.keys()
        assert not any(self.follower.blocks[number] for number in gone), "a lost group holds something"


def test_a_follower_knows_what_is_cached_through_preemption_losses_and_faults() -> None:
    followed = 0
    for seed in range(150):
        simulation = random_run(seed, kind=Followed, check=False)
        followed += isinstance(simulation, Followed) and simulation.follower is not None
    assert followed > 75


def test_contents_name_parents_before_their_children() -> None:
    simulation = make_simulation()
    simulation.submit(EIGHT, max_tokens=4)
    simulation.settle()
    (news,) = simulation.core.cache_watch.contents()
    parents = [b"", *(item.digest for item in news.changes if isinstance(item, HashedBlock))]
    assert len(news.changes) > 3
    for index, item in enumerate(news.changes):
        assert isinstance(item, HashedBlock) and item.parent in parents[: index + 1]


def test_the_first_block_of_a_salt_continues_something_that_nobody_is_told() -> None:
    simulation = make_simulation()
    simulation.submit(EIGHT, max_tokens=1, cache_salt="tenant")
    simulation.settle()
    (news,) = simulation.core.cache_watch.contents()
    known = {item.digest for item in news.changes if isinstance(item, HashedBlock)}
    assert [item.parent in known for item in news.changes if isinstance(item, HashedBlock)] == [False, True, True, True]


def test_a_flush_forgets_what_is_cached_and_waits_for_live_requests() -> None:
    simulation = make_simulation()
    simulation.submit(EIGHT, max_tokens=2)
    assert not simulation.core.flush_cache()
    simulation.settle()
    assert simulation.core.flush_cache()
    simulation.core.check_invariants()
    simulation.submit(EIGHT, max_tokens=1)
    simulation.plan(0)
    assert simulation.sides[0].plans[0].admitted[0].cached_length == 0
    simulation.settle()


def test_every_watching_frontend_is_told_all_and_then_what_changes() -> None:
    simulation, followers = make_simulation(), {1: Follower(), 2: Follower()}
    reporter = CacheReporter(lambda peer, news: followers[peer].hear(news))
    reporter.watch(1, True)
    reporter.attach(simulation.core.cache_watch)
    for step, prompt in enumerate((EIGHT, PROMPTS[1][:8], PROMPTS[2][:8])):
        if step == 1:
            reporter.watch(2, True)
            assert followers[2].blocks == followers[1].blocks != {0: {}}
        simulation.submit(prompt, max_tokens=2)
        simulation.settle()
        reporter.tell()
        if step == 1:
            assert followers[2].blocks == followers[1].blocks
            reporter.watch(1, False)
    assert followers[1].blocks.items() != followers[2].blocks.items()
    reporter.watch(2, False)
    assert simulation.core._groups[0].pool.prefix.changes is None, "collected though nobody watches"
