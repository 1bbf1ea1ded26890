"""The core's end of the socket with a script instead of a scheduler: says what a test or a benchmark tells it to."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from shared.framing import read_message, write_message
from shared.pb import core_pb2
from shared.pb.generation_pb2 import RequestStats
from shared.wire import pack, unpack
from tests.patience import PATIENCE_S

Answer = tuple[Sequence[int], core_pb2.Ended | None]
"""Tokens, and how the sequence ends after them; None leaves it open."""


UPTIME_S = 5.0
"""As the statistics have it."""


def length() -> core_pb2.Ended:
    """The end by max_tokens."""
    return core_pb2.Ended(length=core_pb2.LengthReached())


def stopped(token_id: int) -> core_pb2.Ended:
    """The end by a stop token."""
    return core_pb2.Ended(stop_token_id=token_id)


def failed(code: int, message: str, retry_after_ms: int = 0) -> core_pb2.Ended:
    """The end by an error; `code` is a gRPC status code's number."""
    return core_pb2.Ended(failure=core_pb2.Failure(code=code, message=message, retry_after_ms=retry_after_ms))


def ready_state(**changes: object) -> core_pb2.CoreState:
    """An active core with one worker group and a small model."""
    values: dict[str, object] = {
        "active": True,
        "progressing": True,
        "max_running": 8,
        "model": core_pb2.ServedModel(
            dtype="float32", context_limit=200, vocabulary_size=512, eos_token_ids=[398, 400], block_size=2
        ),
        "groups": [core_pb2.GroupState(endpoint="worker:1", connected=True, total_blocks=64, free_blocks=60)],
    }
    return core_pb2.CoreState(**{**values, **changes})  # type: ignore[arg-type]


class FakeCore:
    """Serves one frontend. What arrived is kept for the test to look at."""

    def __init__(self, path: Path, answer: Callable[[core_pb2.Submit], Answer] | None = None) -> None:
        """With `answer`, every Submit is answered at once; without, the test calls give()."""
        self.state = ready_state()
        self.submits: list[core_pb2.Submit] = []
        self.masks: list[core_pb2.MaskReady] = []
        self.cancelled: list[int] = []
        self.aborted: list[str] = []
        self.requests_ended: list[RequestStats] = []
        self.led_before: list[int] = []
        """What LedBefore messages said."""
        self.waiting: list[int] = []
        """What Waiting messages said."""
        self.connections = 0
        self.answer_aborts = True
        self.watched: list[bool] = []
        """What WatchCache messages said."""
        self.refused_flushes = 0
        """How many FlushCache messages to answer with no."""
        self._path = path
        self._answer = answer
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.die()

    async def start(self) -> None:
        """Listens; also again after die()."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._accept, self._path)

    def die(self) -> None:
        """Closes everything, like a process that is killed."""
        assert self._server is not None
        self._server.close()
        if self._writer is not None:
            self._writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.connections += 1
        self.tell(self.state)
        try:
            while (payload := await read_message(reader)) is not None:
                self._handle(core_pb2.FrontendMessage.FromString(payload))
        except ConnectionError:
            pass
        finally:
            writer.close()

    def _handle(self, message: core_pb2.FrontendMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "submit":
            self.submits.append(message.submit)
            if self._answer is not None:
                tokens, ended = self._answer(message.submit)
                self.give(message.submit, tokens, ended, cached_tokens=0)
        elif kind == "mask_ready":
            self.masks.append(message.mask_ready)
        elif kind == "cancel":
            self.cancelled.append(message.cancel.handle)
        elif kind == "abort_by_id":
            self._abort(message.abort_by_id)
        elif kind == "request_ended":
            self.requests_ended.append(message.request_ended)
        elif kind == "led_before":
            self.led_before.append(message.led_before.term)
        elif kind == "waiting":
            self.waiting.append(message.waiting.requests)
        elif kind == "watch_cache":
            self.watched.append(message.watch_cache.watch)
        elif kind == "stats_question":
            stats = core_pb2.StatsAnswer(question=message.stats_question.question, stats={"uptime_s": UPTIME_S})
            self._send(core_pb2.CoreMessage(stats_answer=stats))
        elif kind == "flush_cache":
            self.refused_flushes -= 1
            answer = core_pb2.FlushAnswer(question=message.flush_cache.question, flushed=self.refused_flushes < 0)
            self._send(core_pb2.CoreMessage(flush_answer=answer))

    def _abort(self, question: core_pb2.AbortById) -> None:
        self.aborted.append(question.request_id)
        if not self.answer_aborts:
            return
        mine = [submit for submit in self.submits if submit.request_id == question.request_id]
        for submit in mine:
            self.give(submit, (), failed(1, "aborted by its id"))
        self._send(core_pb2.CoreMessage(abort_answer={"question": question.question, "found": bool(mine)}))  # type: ignore[arg-type]

    def tell(self, state: core_pb2.CoreState) -> None:
        """Sends a state and keeps it for the next connection."""
        self.state = state
        self._send(core_pb2.CoreMessage(state=state))

    def give(
        self,
        submit: core_pb2.Submit,
        tokens: Sequence[int],
        ended: core_pb2.Ended | None = None,
        cached_tokens: int | None = None,
    ) -> None:
        """One batch for one sequence."""
        batch = core_pb2.TokenBatch(handles=pack_ints([submit.handle] * len(tokens)), token_ids=pack_ints(tokens))
        if cached_tokens is not None:
            batch.started.add(handle=submit.handle, cached_tokens=cached_tokens)
        if ended is not None:
            batch.ended.add(handle=submit.handle).MergeFrom(ended)
        self.send_batch(batch)

    def send_batch(self, batch: core_pb2.TokenBatch) -> None:
        """One step's outputs."""
        batch.time_us = time.monotonic_ns() // 1000
        self._send(core_pb2.CoreMessage(tokens=batch))

    def tell_cache(self, news: core_pb2.CacheNews) -> None:
        """What came into a group's cache, or left it."""
        self._send(core_pb2.CoreMessage(cache_news=news))

    async def submitted(self, count: int = 1) -> list[core_pb2.Submit]:
        """Waits until `count` Submits have arrived in all; the last `count` of them."""
        await until(lambda: len(self.submits) >= count)
        return self.submits[-count:]

    def _send(self, message: core_pb2.CoreMessage) -> None:
        if self._writer is not None and not self._writer.is_closing():
            write_message(self._writer, message.SerializeToString())


def pack_ints(values: Iterable[int]) -> bytes:
    """Packed little-endian int32."""
    return pack(np.array(list(values), dtype=np.int32))


def ids(data: bytes) -> list[int]:
    """The inverse of pack_ints."""
    values: list[int] = unpack(data).tolist()
    return values


async def until(condition: Callable[[], bool]) -> None:
    """Waits for a condition; fails the test if it does not come."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)
