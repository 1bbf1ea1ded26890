"""The core's end of the frontends' sockets: turns their messages into requests, and step outputs into their batches.

Owns the connections and the numbering: a sequence's key is (connection number << 32) | the frontend's handle.
Decides nothing about sequences. Never waits for a frontend: one that doesn't read is disconnected, and it comes back.
"""

import asyncio
import time
from typing import Protocol

import numpy as np
import structlog
from google.protobuf.message import DecodeError

from scheduler_svc.core import CacheChange, CacheChanges, Ended, HashedBlock, Request, RequeueCause, StepOutputs
from shared.errors import ProtocolError, QueueFull, RequestFailed, TandemError
from shared.framing import FramingError, read_message, write_message
from shared.pb import core_pb2
from shared.pb.generation_pb2 import GetStatsResponse, RequestStats
from shared.rpc import STATUS_CODES
from shared.types import FinishReason
from shared.wire import pack, rules_from_pb, unpack

HANDLE_BITS = 32
HANDLE_MASK = (1 << HANDLE_BITS) - 1
MOST_WAITING = 1 << 20
"""Requests that one frontend may say wait there."""
MOST_CHANGES = 1024
"""Changes of a cache in one message: a block of 256 tokens is a kilobyte."""

_CAUSES = {
    RequeueCause.PREEMPTED: core_pb2.REQUEUE_CAUSE_PREEMPTED,
    RequeueCause.WORKER_LOST: core_pb2.REQUEUE_CAUSE_WORKER_LOST,
    RequeueCause.TAINTED: core_pb2.REQUEUE_CAUSE_TAINTED,
    RequeueCause.DRAINED: core_pb2.REQUEUE_CAUSE_DRAINED,
}

_log = structlog.get_logger(__name__)


class FrontendListener(Protocol):
    """Who decides. Each call is short and never awaits."""

    def state(self) -> core_pb2.CoreState:
        """What a frontend is told when it connects."""

    def submit(self, request: Request) -> None:
        """A new sequence. Raises a TandemError to refuse it."""

    def cancel(self, key: int) -> None:
        """A frontend wants no more of a sequence."""

    def abort_by_id(self, request_id: str) -> bool:
        """Ends a request wherever it is; whether there was one."""

    def mask_ready(self, key: int, position: int, allowed: bytes) -> None:
        """The tokens that a constrained sequence may sample next."""

    def request_ended(self, request: RequestStats) -> None:
        """A frontend's call has ended."""

    def stats(self, max_requests: int) -> GetStatsResponse:
        """What the service has done, but for its load."""

    def watch_cache(self, peer: int, watch: bool) -> None:
        """A frontend begins or ends following what is cached."""

    def flush_cache(self) -> bool:
        """Forgets what is cached, unless a request is live; whether it did."""

    def led_before(self, term: int) -> None:
        """A frontend knew this scheduler as the leader before this core process."""

    def left(self, peer: int) -> None:
        """A frontend is gone, with all its sequences."""

    def broke(self, error: Exception) -> None:
        """One of the above failed by a bug."""


class FrontendLinks:
    """The connections of all frontends."""

    def __init__(self, listener: FrontendListener) -> None:
        self._listener = listener
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._accepted = 0
        self._waiting: dict[int, int] = {}

    @property
    def waiting(self) -> int:
        """Requests that wait in frontends for the first worker, which alone tells how to check them."""
        return sum(self._waiting.values())

    async def serve(self, path: str) -> asyncio.Server:
        """Accepts frontends on the Unix socket `path`."""
        return await asyncio.start_unix_server(self._accept, path, limit=1 << 20)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """No coroutine: asyncio would report the end of one that is cancelled when the process stops as an error."""
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._accepted += 1
        peer = self._accepted
        self._writers[peer] = writer
        try:
            self._send(peer, core_pb2.CoreMessage(state=self._listener.state()))
            while (payload := await read_message(reader)) is not None:
                self._handle(peer, core_pb2.FrontendMessage.FromString(payload))
        except (OSError, DecodeError, ProtocolError) as error:
            _log.warning("frontend disconnected", reason=str(error))
        except Exception as error:
            self._listener.broke(error)
        finally:
            self._writers.pop(peer, None)
            self._waiting.pop(peer, None)
            writer.close()
            self._listener.left(peer)

    def _handle(self, peer: int, message: core_pb2.FrontendMessage) -> None:
        match message.WhichOneof("kind"):
            case "submit":
                self._submit(_key(peer, message.submit.handle), message.submit)
            case "cancel":
                self._listener.cancel(_key(peer, message.cancel.handle))
            case "abort_by_id":
                question = message.abort_by_id
                answer = core_pb2.AbortAnswer(question=question.question)
                answer.found = self._listener.abort_by_id(question.request_id)
                self._send(peer, core_pb2.CoreMessage(abort_answer=answer))
            case "mask_ready":
                mask = message.mask_ready
                self._listener.mask_ready(_key(peer, mask.handle), mask.position, mask.allowed)
            case "request_ended":
                self._listener.request_ended(message.request_ended)
            case "stats_question":
                asked = message.stats_question
                stats = core_pb2.StatsAnswer(question=asked.question, stats=self._listener.stats(asked.max_requests))
                self._send(peer, core_pb2.CoreMessage(stats_answer=stats))
            case "led_before":
                self._listener.led_before(message.led_before.term)
            case "waiting":
                self._waiting[peer] = min(message.waiting.requests, MOST_WAITING)
            case "watch_cache":
                self._listener.watch_cache(peer, message.watch_cache.watch)
            case "flush_cache":
                number, flushed = message.flush_cache.question, self._listener.flush_cache()
                forgotten = core_pb2.FlushAnswer(question=number, flushed=flushed)
                self._send(peer, core_pb2.CoreMessage(flush_answer=forgotten))

    def _submit(self, key: int, submit: core_pb2.Submit) -> None:
        try:
            self._listener.submit(_request(key, submit))
        except TandemError as error:
            self.end(key, error)
        except Exception as error:  # fails alone: were the core to end, its successor would get the same request
            _log.exception("a submit failed by a bug", request_id=submit.request_id, exc_info=error)
            self._listener.cancel(key)
            self.end(key, RequestFailed("internal error; the scheduler's log has the details"))

    def broadcast(self, state: core_pb2.CoreState) -> None:
        """Tells every frontend the core's state."""
        for peer in list(self._writers):
            self._send(peer, core_pb2.CoreMessage(state=state))

    def deliver(self, outputs: StepOutputs) -> None:
        """One message to each frontend whose sequences are among the outputs."""
        batches: dict[int, core_pb2.TokenBatch] = {}
        peers = outputs.keys >> HANDLE_BITS
        handles = (outputs.keys & HANDLE_MASK).astype(np.uint32).view(np.int32)
        for peer in np.unique(peers).tolist():
            mine = peers == peer
            logprobs = outputs.logprobs.select(mine)
            batches[peer] = core_pb2.TokenBatch(
                handles=pack(handles[mine]),
                token_ids=pack(outputs.token_ids[mine]),
                logprob_sizes=pack(logprobs.sizes),
                logprobs=logprobs.entries,
            )
        for key, cached_tokens in outputs.started:
            batch = batches.setdefault(key >> HANDLE_BITS, core_pb2.TokenBatch())
            batch.started.add(handle=key & HANDLE_MASK, cached_tokens=cached_tokens)
        for key, entries in outputs.prompt_logprobs:
            batch = batches.setdefault(key >> HANDLE_BITS, core_pb2.TokenBatch())
            batch.prompt_logprobs.add(handle=key & HANDLE_MASK, entries=entries)
        for key, cause in outputs.requeued:
            batch = batches.setdefault(key >> HANDLE_BITS, core_pb2.TokenBatch())
            batch.requeued.add(handle=key & HANDLE_MASK, cause=_CAUSES[cause])
        for ended in outputs.ended:
            batch = batches.setdefault(ended.key >> HANDLE_BITS, core_pb2.TokenBatch())
            batch.ended.append(_ended(ended))
        now = time.monotonic_ns() // 1000
        for peer, batch in batches.items():
            batch.time_us = now
            self._send(peer, core_pb2.CoreMessage(tokens=batch))

    def tell_cache(self, peer: int, news: CacheChanges) -> None:
        """Tells one frontend what came into a group's cache, or left it."""
        for start in range(0, len(news.changes) or 1, MOST_CHANGES):
            message = core_pb2.CacheNews(group=news.group, cleared=news.cleared and not start)
            message.changes.extend(map(_cache_change, news.changes[start : start + MOST_CHANGES]))
            self._send(peer, core_pb2.CoreMessage(cache_news=message))

    def end(self, key: int, error: TandemError) -> None:
        """Tells a sequence's frontend that it failed."""
        ended = core_pb2.Ended(handle=key & HANDLE_MASK, failure=failure(error))
        self._send(key >> HANDLE_BITS, core_pb2.CoreMessage(tokens=core_pb2.TokenBatch(ended=[ended])))

    def _send(self, peer: int, message: core_pb2.CoreMessage) -> None:
        writer = self._writers.get(peer)
        if writer is None:
            return  # gone: `left` has ended its sequences
        try:
            write_message(writer, message.SerializeToString())
        except FramingError as error:
            _log.warning("frontend disconnected", reason=str(error))
            del self._writers[peer]
            writer.transport.abort()


def _key(peer: int, handle: int) -> int:
    return peer << HANDLE_BITS | handle


def peer_of(key: int) -> int:
    """The number of the connection that a key belongs to."""
    return key >> HANDLE_BITS


def _request(key: int, submit: core_pb2.Submit) -> Request:
    sampling = submit.sampling
    return Request(
        key=key,
        request_id=submit.request_id,
        sample_index=submit.sample_index,
        prompt=unpack(submit.prompt),
        output=unpack(submit.output),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        rules=rules_from_pb(sampling),
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
        prompt_logprobs_received=submit.prompt_logprobs_received,
        max_tokens=submit.max_tokens or None,
        min_tokens=submit.min_tokens,
        stop_token_ids=tuple(unpack(submit.stop_token_ids).tolist()),
        cache_salt=submit.cache_salt,
        priority=submit.priority,
        client=submit.client,
        constrained=submit.constrained,
        again=submit.again,
    )


def _ended(ended: Ended) -> core_pb2.Ended:
    message = core_pb2.Ended(handle=ended.key & HANDLE_MASK)
    if isinstance(ended.how, TandemError):
        message.failure.CopyFrom(failure(ended.how))
    elif ended.how is FinishReason.LENGTH:
        message.length.SetInParent()
    else:
        assert ended.stop_token_id is not None, "a stop token ended it"
        message.stop_token_id = ended.stop_token_id
    return message


def _cache_change(change: CacheChange) -> core_pb2.CacheChange:
    if not isinstance(change, HashedBlock):
        return core_pb2.CacheChange(block=_name(change))
    message = core_pb2.CacheChange(block=_name(change.digest), token_ids=change.content)
    if change.parent:
        message.parent = _name(change.parent)
    return message


def _name(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")


def failure(error: TandemError) -> core_pb2.Failure:
    """An error by kind, as a frontend will raise it again."""
    retry_after_ms = error.retry_after_ms if isinstance(error, QueueFull) else 0
    return core_pb2.Failure(code=STATUS_CODES[type(error)].value[0], message=str(error), retry_after_ms=retry_after_ms)
