"""Which blocks hold which tokens: hashed chains and the map from content to block. Knows nothing of reference counts.

An entry is found by the digest of (parent's digest, tokens) and counts as a hit only if its parent entry and its
tokens are equal, so that a collision of digests can't give one tenant another's K/V.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from xxhash import xxh3_128_digest

from shared.types import IntArray

Parent: TypeAlias = int | str
"""The entry that a block continues; a sequence's first block continues its cache salt."""


class HashedBlock(NamedTuple):
    """A full block of known tokens."""

    digest: bytes
    """xxh3_128 chained over (salt, all tokens up to the block's end)."""
    content: bytes
    """The block's tokens, int32."""
    parent: bytes
    """Digest of the block that it continues; of a first block: of its salt, or empty if it has none."""


CacheChange: TypeAlias = HashedBlock | bytes
"""What a prefix map gained, or the digest of what it lost."""


def hash_blocks(hashed: list[HashedBlock], tokens: IntArray, salt: str, block_size: int, seed: int) -> None:
    """Appends the full blocks of `tokens` ([n]) that `hashed` lacks."""
    width = 4 * block_size
    data = tokens[len(hashed) * block_size : len(tokens) // block_size * block_size].tobytes()
    digest = hashed[-1].digest if hashed else xxh3_128_digest(salt.encode(), seed)
    parent = digest if hashed or salt else b""
    for start in range(0, len(data), width):
        content = data[start : start + width]
        digest = xxh3_128_digest(digest + content, seed)
        hashed.append(HashedBlock(digest, content, parent))
        parent = digest


class PrefixMap:
    """The published blocks of one pool."""

    def __init__(self, num_blocks: int) -> None:
        self._block_of: dict[bytes, int] = {}
        self._item: list[HashedBlock | None] = [None] * num_blocks
        self._parent: list[Parent] = [""] * num_blocks
        self._entry: list[int] = [0] * num_blocks
        self._entries = 0  # numbers are never reused: a child can't be taken for another parent's
        self.changes: list[CacheChange] | None = None
        """What came and went since somebody emptied it; None while nobody watches."""

    def __contains__(self, block: int) -> bool:
        return self._item[block] is not None

    def entered(self) -> list[HashedBlock]:
        """What the published blocks hold, parents before children. O(pool)."""
        blocks = sorted(self._block_of.values(), key=self._entry.__getitem__)
        return [item for block in blocks if (item := self._item[block]) is not None]

    def match(self, hashed: Sequence[HashedBlock], salt: str) -> tuple[list[int], Parent]:
        """The blocks of the longest published prefix, and the last one's entry."""
        blocks: list[int] = []
        parent: Parent = salt
        for item in hashed:
            block = self._find(item, parent)
            if block is None:
                break
            blocks.append(block)
            parent = self._entry[block]
        return blocks, parent

    def publish(self, blocks: Sequence[int], hashed: Sequence[HashedBlock], parent: Parent) -> Parent:
        """Enters blocks that continue `parent`, where no equal one is known already; the last one's entry."""
        for block, item in zip(blocks, hashed, strict=True):
            known = self._find(item, parent)
            parent = self._enter(block, item, parent) if known is None else self._entry[known]
        return parent

    def forget(self, block: int) -> None:
        """Removes the block's entry, if it has one."""
        item = self._item[block]
        if item is not None:
            del self._block_of[item.digest]
            self._item[block] = None
            if self.changes is not None:
                self.changes.append(item.digest)

    def forget_all(self) -> None:
        """Removes every entry."""
        for block in list(self._block_of.values()):
            self.forget(block)

    def with_descendants(self, blocks: Iterable[int]) -> set[int]:
        """These blocks and all published ones that continue one of them. O(pool), for rare events."""
        found = set(blocks)
        entries: set[Parent] = {self._entry[block] for block in found if block in self}
        size = 0
        while size != len(found):
            size = len(found)
            found.update(block for block, parent in enumerate(self._parent) if block in self and parent in entries)
            entries.update(self._entry[block] for block in found if block in self)
        return found

    def _find(self, item: HashedBlock, parent: Parent) -> int | None:
        block = self._block_of.get(item.digest)
        if block is None or self._parent[block] != parent:
            return None
        known = self._item[block]
        return block if known is not None and known.content == item.content else None

    def _enter(self, block: int, item: HashedBlock, parent: Parent) -> int:
        unreachable = self._block_of.get(item.digest)
        if unreachable is not None:  # its parent's entry is gone, or the digests collide
            self.forget(unreachable)
        self._entries += 1
        self._block_of[item.digest] = block
        self._item[block] = item
        self._parent[block], self._entry[block] = parent, self._entries
        if self.changes is not None:
            self.changes.append(item)
        return self._entries

    def check(self) -> None:
        """Asserts that blocks and digests map to each other."""
        entered = {item.digest: block for block, item in enumerate(self._item) if item is not None}
        assert entered == self._block_of, "prefix map and blocks disagree"
