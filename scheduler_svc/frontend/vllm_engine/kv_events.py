"""The cache feed as VllmEngine's batches of KV events. Each stream numbers its own batches from 1.

A stream's first batch clears what the subscriber knows, and so does one after it fell behind; what is cached follows.
No history is kept: who wants to go on from a number starts over.
"""

import time
from collections.abc import AsyncGenerator, Iterator

import numpy as np
from smg_grpc_proto.generated import common_pb2 as common

from scheduler_svc.frontend.cache_feed import Follower
from scheduler_svc.frontend.cache_mirror import CachedBlock, CacheEvent

MOST_BLOCKS = 1024
"""Blocks in one batch: subscribers take messages of 4 MiB, and a block of 256 tokens is less than a kilobyte."""
_SIGN = 1 << 63


async def batches(follower: Follower) -> AsyncGenerator[common.KvEventBatch, None]:
    """For ever."""
    sequence_number = 0
    while True:
        cleared, events = await follower.next()
        for start in range(0, len(events) or 1, MOST_BLOCKS):
            sequence_number += 1
            batch = common.KvEventBatch(sequence_number=sequence_number, timestamp=time.time())
            if cleared and not start:
                batch.events.add().cleared.SetInParent()
            batch.events.extend(_grouped(events[start : start + MOST_BLOCKS]))
            yield batch


def _grouped(events: list[CacheEvent]) -> Iterator[common.KvCacheEvent]:
    """Blocks that continue each other become one event, and so do those that left one after the other."""
    event, last = common.KvCacheEvent(), None
    for change in events:
        if not isinstance(change, CachedBlock):
            if not event.HasField("removed"):
                if last is not None:
                    yield event
                event = common.KvCacheEvent()
            event.removed.block_hashes.append(_signed(change))
        else:
            if not event.HasField("stored") or change.parent != last:
                if last is not None:
                    yield event
                event = common.KvCacheEvent()
                if change.parent is not None:
                    event.stored.parent_block_hash = _signed(change.parent)
            event.stored.blocks.append(_block(change))
        last = change.block if isinstance(change, CachedBlock) else change
    if last is not None:
        yield event


def _block(cached: CachedBlock) -> common.KvBlock:
    token_ids = np.frombuffer(cached.token_ids, "<i4").tolist()
    return common.KvBlock(block_hash=_signed(cached.block), token_ids=token_ids, block_size=len(token_ids))


def _signed(block: int) -> int:
    return block - 2 * _SIGN if block >= _SIGN else block
