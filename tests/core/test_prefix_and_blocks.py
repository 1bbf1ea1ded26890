"""The prefix map and the block pool against naive models."""

import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.core.prefix import HashedBlock, PrefixMap, hash_blocks
from tests.core.simulation import make_simulation

BITS = st.lists(st.integers(0, 1), min_size=0, max_size=10)


def hashed(tokens: list[int], salt: str = "") -> list[HashedBlock]:
    """Blocks of two tokens."""
    blocks: list[HashedBlock] = []
    hash_blocks(blocks, np.array(tokens, dtype=np.int32), salt, 2, 1)
    return blocks


@given(st.lists(st.tuples(BITS, st.sampled_from(["", "a"])), max_size=8), BITS, st.sampled_from(["", "a"]))
def test_match_finds_the_longest_published_prefix(
    published: list[tuple[list[int], str]], wanted: list[int], wanted_salt: str
) -> None:
    prefix = PrefixMap(64)
    next_block = 0
    content: dict[int, tuple[str, list[int]]] = {}
    for tokens, salt in published:
        blocks = hashed(tokens, salt)
        ids = list(range(next_block, next_block + len(blocks)))
        next_block += len(blocks)
        content |= {block: (salt, tokens[: 2 * index + 2]) for index, block in enumerate(ids)}
        prefix.publish(ids, blocks, salt)
        prefix.check()
    found, _ = prefix.match(hashed(wanted, wanted_salt), wanted_salt)
    known = [(salt, tokens[: 2 * count]) for tokens, salt in published for count in range(1, len(tokens) // 2 + 1)]
    expected = max(
        count for count in range(len(wanted) // 2 + 1) if not count or (wanted_salt, wanted[: 2 * count]) in known
    )
    assert len(found) == expected
    for index, block in enumerate(found):
        assert content[block] == (wanted_salt, wanted[: 2 * index + 2])


def test_an_equal_block_keeps_the_first_entry_and_goes_without_it() -> None:
    prefix = PrefixMap(4)
    first = prefix.publish([0], hashed([1, 2]), "")
    assert prefix.publish([1], hashed([1, 2]), "") == first
    prefix.forget(1)
    assert prefix.match(hashed([1, 2]), "")[0] == [0]


def test_a_child_of_a_forgotten_entry_is_replaced() -> None:
    prefix = PrefixMap(4)
    blocks = hashed([1, 2, 3, 4])
    prefix.publish([0, 1], blocks, "")
    prefix.forget(0)
    prefix.publish([2, 3], blocks, "")
    prefix.check()
    assert prefix.match(blocks, "")[0] == [2, 3]


def test_descendants() -> None:
    prefix = PrefixMap(8)
    prefix.publish([0, 1, 2], hashed([1, 1, 2, 2, 3, 3]), "")
    prefix.publish([0, 1, 3], hashed([1, 1, 2, 2, 4, 4]), "")
    prefix.publish([4], hashed([5, 5]), "")
    assert prefix.with_descendants([1]) == {1, 2, 3}
    assert prefix.with_descendants([7]) == {7}


def test_hashing_goes_on_where_it_stopped() -> None:
    tokens = np.arange(9, dtype=np.int32)
    whole, grown = hashed(tokens.tolist()), hashed(tokens[:5].tolist())
    hash_blocks(grown, tokens, "", 2, 1)
    assert grown == whole and len(whole) == 4


def test_blocks_are_reused_from_the_tail_of_whoever_let_go_first() -> None:
    pool = BlockPool(6)
    first, second = pool.take(3), pool.take(3)
    pool.release(first)
    pool.release(second)
    assert pool.take(6) == [*reversed(first), *reversed(second)]


def test_a_shared_block_is_free_when_the_last_one_lets_go() -> None:
    pool = BlockPool(4)
    table = pool.take(2)
    pool.prefix.publish(table, hashed([1, 2, 3, 4]), "")
    pool.share(table)
    assert pool.num_freed_by([table], frozenset()) == 0 and pool.num_freed_by([table, table], {table[0]}) == 1
    pool.release(table)
    assert pool.num_free == 2
    pool.release(table)
    assert pool.num_free == 4 and pool.num_free_beside(table) == 2
    pool.check([])


def test_the_core_needs_neither_torch_nor_protobuf_nor_grpc() -> None:
    script = (
        "import sys, scheduler_svc.core; "
        "print([name for name in ('torch', 'grpc', 'google.protobuf', 'asyncio', 'structlog') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_a_prompt_is_computed_whole_whatever_other_salts_have_cached() -> None:
    """What takes time is what a plan computes: it must be the same for a prompt that others sent and for a new one."""
    computed = []
    for other in ("red", "blue"):
        simulation = make_simulation()
        simulation.submit((1, 2, 3, 1, 2, 3, 1, 1), max_tokens=1, cache_salt=other)
        simulation.settle()
        before = simulation.core.load().counters.scheduled_tokens
        simulation.submit((1, 2, 3, 1, 2, 3, 1, 1), max_tokens=1, cache_salt="red")
        simulation.settle()
        computed.append(simulation.core.load().counters.scheduled_tokens - before)
    assert computed == [2, 8]


def test_counts_of_tokens_looked_up_found_and_computed() -> None:
    """The last block of a prompt is never taken from the cache: a token is left to compute."""
    simulation = make_simulation()
    for _ in range(2):
        simulation.submit((1, 2, 3, 1, 2, 3, 1, 1), max_tokens=3)
        simulation.settle()
    counters = simulation.core.load().counters
    assert (counters.prefix_queries, counters.prefix_hits) == (16, 6)
    assert (counters.sampled_tokens, counters.scheduled_tokens) == (6, (8 + 2) + (2 + 2))
