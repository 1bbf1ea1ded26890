"""The K/V blocks of one worker group: who holds them, which are free. Knows nothing of slots or plans."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set

from scheduler_svc.core.prefix import PrefixMap


class BlockPool:
    """Reference counts, a free list in order of last use, and the prefix map. Every operation is O(blocks touched)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.prefix = PrefixMap(num_blocks)
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._tainted: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds; published ones among them stay in the prefix map until taken."""
        return len(self._free)

    def num_free_beside(self, blocks: Iterable[int]) -> int:
        """Blocks free for others if `blocks` were shared."""
        references = self._references
        return len(self._free) - sum(references[block] == 0 for block in blocks)

    def num_freed_by(self, tables: Iterable[Sequence[int]], kept: Set[int]) -> int:
        """Blocks, other than `kept`, that would become free if all these tables were released."""
        held: dict[int, int] = {}
        for table in tables:
            for block in table:
                held[block] = held.get(block, 0) + 1
        return sum(self._references[block] == count for block, count in held.items() if block not in kept)

    def take(self, count: int) -> list[int]:
        """Hands out `count` blocks, those free for longest first; the caller made sure that they are there."""
        assert count <= len(self._free), f"{count} blocks asked for, {len(self._free)} free"
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.prefix.forget(block)
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more sequence holds these published blocks."""
        references = self._references
        for block in blocks:
            if references[block] == 0:
                del self._free[block]
            references[block] += 1

    def release(self, table: Sequence[int]) -> None:
        """A sequence lets go of its blocks. The tail is reused first: a prefix is of more use than what follows it."""
        references, free = self._references, self._free
        for block in reversed(table):
            references[block] -= 1
            if references[block] == 0:
                free[block] = None

    def taint(self, blocks: Iterable[int]) -> None:
        """These blocks, which nobody holds, may hold NaN: nobody may find them, and they are zeroed before reuse.

        So are the free ones that continue them in the prefix map: what was computed from NaN is NaN.
        """
        for block in self.prefix.with_descendants(blocks):
            if self._references[block] == 0:
                self.prefix.forget(block)
                self._tainted.add(block)

    def pop_tainted(self, blocks: Sequence[int]) -> list[int]:
        """Those of the blocks just handed out that must be zeroed first."""
        if not self._tainted:
            return []
        tainted = [block for block in blocks if block in self._tainted]
        self._tainted.difference_update(tainted)
        return tainted

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Asserts that counts, free list and prefix map agree with the block tables of all running sequences."""
        used = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a block twice in {table}"
            for block in table:
                used[block] += 1
        assert used == self._references, f"references {self._references}, uses {used}"
        assert sorted(self._free) == [block for block, count in enumerate(used) if not count], "free list"
        for block, count in enumerate(used):
            assert count < 2 or block in self.prefix, f"block {block} is shared but not published"
            assert not count or block not in self._tainted, f"block {block} is held, though it may hold NaN"
        self.prefix.check()
