"""The union of the groups' caches against a naive one, and followers that read late or not at all."""

import asyncio
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.frontend import cache_feed
from scheduler_svc.frontend.cache_feed import Follower
from scheduler_svc.frontend.cache_mirror import CachedBlock, CacheEvent, CacheMirror
from shared.pb import core_pb2

PARENT = {1: None, 2: 1, 3: 2, 4: 1, 5: None, 6: 5, 7: 99}
"""The blocks that there are, and what each continues; 99 is a salt, of which nobody tells."""


def news(group: int, *changes: int, cleared: bool = False) -> core_pb2.CacheNews:
    """Blocks that come; negative: that go."""
    told = core_pb2.CacheNews(group=group, cleared=cleared)
    for block in changes:
        change = told.changes.add(block=abs(block), token_ids=bytes([block, 0, 0, 0]) if block > 0 else b"")
        if block > 0 and (parent := PARENT[block]) is not None:
            change.parent = parent
    return told


class Groups:
    """What two groups hold, as a core tells it: a block comes with its parent there, and goes before it."""

    def __init__(self) -> None:
        self.held: list[set[int]] = [set(), set()]

    def turn(self, group: int, block: int) -> core_pb2.CacheNews | None:
        """The block comes where it was not, or goes where it was; None where it can't."""
        held, parent = self.held[group], PARENT[block]
        if block not in held:
            if parent in PARENT and parent not in held:
                return None
            held.add(block)
            return news(group, block)
        if any(PARENT[other] == block for other in held):
            return None
        held.discard(block)
        return news(group, -block)

    def union(self) -> set[int]:
        """What a prompt without salt can find anywhere."""
        return (self.held[0] | self.held[1]) - {7}


def replay(blocks: set[int], events: Iterable[CacheEvent]) -> None:
    for event in events:
        if isinstance(event, CachedBlock):
            assert event.block not in blocks, "came twice"
            assert event.parent is None or event.parent in blocks, "came before its parent"
            assert event.token_ids == bytes([event.block, 0, 0, 0]) and event.parent == PARENT[event.block]
            blocks.add(event.block)
        else:
            blocks.remove(event)


STEPS = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([0, *PARENT])), max_size=60)


@given(STEPS)
def test_events_and_contents_are_the_union_of_the_groups(steps: list[tuple[int, int]]) -> None:
    mirror, groups, known = CacheMirror(), Groups(), set[int]()
    for group, block in steps:
        if block:
            told = groups.turn(group, block)
        else:
            groups.held[group].clear()
            told = news(group, cleared=True)
        if told is not None:
            replay(known, mirror.apply(told))
        assert known == groups.union()
    anew = set[int]()
    replay(anew, mirror.blocks())
    assert anew == groups.union()


def test_a_child_whose_parent_came_back_is_not_told_before_it() -> None:
    mirror = CacheMirror()
    mirror.apply(news(0, 1, 2, -1, 1))
    assert [cached.block for cached in mirror.blocks()] == [1]


def test_a_follower_that_does_not_read_is_told_everything_anew() -> None:
    async def scenario() -> None:
        mirror = CacheMirror()
        follower = Follower(mirror)
        assert await follower.next() == (True, [])
        follower.add(mirror.apply(news(0, 1, 2)))
        cleared, events = await follower.next()
        assert not cleared and [event.block for event in events if isinstance(event, CachedBlock)] == [1, 2]
        for _ in range(cache_feed.MOST_PENDING):
            for told in (news(0, 5), news(0, -5)):
                follower.add(mirror.apply(told))
                assert len(follower._pending) <= cache_feed.MOST_PENDING
        cleared, events = await follower.next()
        assert cleared and [event.block for event in events if isinstance(event, CachedBlock)] == [1, 2]

    asyncio.run(scenario())
