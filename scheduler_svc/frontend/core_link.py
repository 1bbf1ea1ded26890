"""The frontend's end of the core's Unix socket.

Owns the connection, the handles and the core's last state. When the core dies, the live samples stay here and are
submitted again, with their output so far, to the core that takes its place. Knows nothing of clients.
"""

import asyncio
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import structlog
from google.protobuf.message import DecodeError

from scheduler_svc.frontend.generation import Sample
from scheduler_svc.frontend.timeline import CORE_LOST, DRAINED, PREEMPTED, TAINTED, WORKER_LOST
from scheduler_svc.frontend.token_batch import read_tokens
from shared.errors import ProtocolError, Standby, TandemError, Unavailable
from shared.framing import FramingError, read_message, write_message
from shared.histogram import SHORT_S, Histogram
from shared.pb import core_pb2
from shared.pb.generation_pb2 import GetStatsResponse, RequestStats
from shared.wire import pack

RECONNECT_INTERVAL = 0.05
"""Seconds between attempts to reach a core that is away: one connect to a Unix socket costs microseconds."""
WRITERS_SHARE = 1.0
"""Time for the clients' writers per time spent on a batch of tokens. Without it a core that is faster than the writers
would starve them, since reading what has arrived already never yields; with it, tokens gather and messages grow."""
_READ_BUFFER_BYTES = 1 << 20
_MAX_HANDLE = (1 << 32) - 1

_CAUSES = {
    core_pb2.REQUEUE_CAUSE_PREEMPTED: PREEMPTED,
    core_pb2.REQUEUE_CAUSE_WORKER_LOST: WORKER_LOST,
    core_pb2.REQUEUE_CAUSE_TAINTED: TAINTED,
    core_pb2.REQUEUE_CAUSE_DRAINED: DRAINED,
}

_log = structlog.get_logger(__name__)


class CacheListener(Protocol):
    """Who follows what is cached."""

    def cache_news(self, news: core_pb2.CacheNews) -> None:
        """Something came into a group's cache, or left it."""

    def cache_lost(self) -> None:
        """The core is gone; its successor begins with nothing."""


class CoreLink:
    """What the frontend knows of the core and asks of it."""

    def __init__(self, path: Path, timeout: float) -> None:
        """`path` is the core's socket; `timeout` is how long requests wait for a core that is away, seconds."""
        self._path = path
        self._timeout = timeout
        self._writer: asyncio.StreamWriter | None = None
        self._live: dict[int, Sample] = {}
        self._handles: dict[Sample, int] = {}
        self._last_handle = 0
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._last_question = 0
        self._cache_listener: CacheListener | None = None
        self._model = core_pb2.ServedModel()
        self._ready = asyncio.Event()
        self._waiting = 0
        self.state: core_pb2.CoreState | None = None
        """The core's last word; None while it is away."""
        self._told = 0
        self._news = asyncio.Event()
        self._led_term: int | None = None
        """The number of this scheduler's claim, where the last core led."""
        self.gaps = Histogram(SHORT_S)
        """Seconds between two tokens of a sample."""
        self.resubmissions = 0
        """Samples submitted again, to a core that took another's place."""

    async def run(self) -> None:
        """Keeps the link up until cancelled."""
        giving_up = self._give_up_later()
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path, limit=_READ_BUFFER_BYTES)
            except OSError:
                await asyncio.sleep(RECONNECT_INTERVAL)
                continue
            giving_up.cancel()
            try:
                await self._serve(reader, writer)
                reason = "it closed the connection"
            except (OSError, DecodeError, ProtocolError) as error:
                reason = str(error)
            finally:
                writer.close()
                self._disconnected()
            _log.info("core disconnected", reason=reason)  # its parent knows why, and warns
            giving_up = self._give_up_later()
            await asyncio.sleep(RECONNECT_INTERVAL)  # also from one that does the same again

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        if self._led_term is not None:
            self._send(core_pb2.FrontendMessage(led_before=core_pb2.LedBefore(term=self._led_term)))
        for handle, sample in self._live.items():
            sample.submission.output = pack(np.array(sample.output, dtype=np.int32))
            sample.submission.again = True
            sample.submission.prompt_logprobs_received = sample.logprobs.num_received
            sample.timeline.requeued(CORE_LOST, time.monotonic())
            self.resubmissions += 1
            self._send_submit(sample)
            _log.info("submitted again", request_id=sample.submission.request_id, handle=handle)
        if self._cache_listener is not None:
            self._send(core_pb2.FrontendMessage(watch_cache=core_pb2.WatchCache(watch=True)))
        while (payload := await read_message(reader)) is not None:
            started = time.perf_counter()
            self._handle(core_pb2.CoreMessage.FromString(payload))
            await asyncio.sleep(WRITERS_SHARE * (time.perf_counter() - started))

    def _disconnected(self) -> None:
        self._writer = None
        self._set_state(None)
        if self._cache_listener is not None:
            self._cache_listener.cache_lost()
        questions, self._questions = self._questions, {}
        for answer in questions.values():
            if not answer.done():
                answer.set_exception(Unavailable("the scheduler core restarts; try again"))

    def _give_up_later(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._timeout, lambda: self.fail_all(self._away()))

    def fail_all(self, error: TandemError) -> None:
        """Ends every live sample's call; the calls cancel what the core still has of them."""
        for sample in self._live.values():
            sample.failed(error)

    def _away(self) -> Unavailable:
        missing = "no worker has come" if self.state is not None else "the scheduler core has been away"
        return Unavailable(f"{missing} for {self._timeout:g} s: the scheduler's log says why; try again later")

    async def ready(self, *, queues: bool = False) -> core_pb2.ServedModel:
        """Waits until the core is there and the model known. Raises Unavailable after the timeout, Standby at once.

        `queues`: a request does, which counts as waiting.
        """
        if not self._ready.is_set():
            self._waiting += queues
            try:
                await asyncio.wait_for(self._ready.wait(), self._timeout)
            except TimeoutError:
                raise self._away() from None
            finally:
                self._waiting -= queues
        if self.state is not None:
            self.serving_state()
        return self._model

    async def _reached(self) -> None:
        """Waits until the core is there, whatever it knows. Raises as ready() does."""
        try:
            async with asyncio.timeout(self._timeout):
                while self.state is None:
                    await self._news.wait()
        except TimeoutError:
            raise self._away() from None
        self.serving_state()

    def serving_state(self) -> core_pb2.CoreState:
        """The core's last word. Raises Unavailable while it is away, Standby where another scheduler serves."""
        if self.state is None:
            raise Unavailable("the scheduler core restarts; try again")
        if self.state.standby:
            where = f": {self.state.active_endpoint}" if self.state.active_endpoint else ""
            raise Standby(f"this scheduler stands by, another one is the active one{where}", self.state.active_endpoint)
        return self.state

    def submit(self, samples: Iterable[Sample]) -> None:
        """Hands samples to the core, now or when it comes back; from then on it feeds them."""
        for sample in samples:
            handle = self._new_handle()
            sample.submission.handle = handle
            self._live[handle] = sample
            self._handles[sample] = handle
            if sample.constraint is not None:
                sample.constraint.watch(partial(self._send_mask, sample), sample.failed)
            self._send_submit(sample)

    def cancel(self, samples: Iterable[Sample]) -> None:
        """Wants no more of these samples; those that have ended are passed over."""
        for sample in samples:
            handle = self._handles.pop(sample, None)
            if handle is not None:
                del self._live[handle]
                self._send(core_pb2.FrontendMessage(cancel=core_pb2.Cancel(handle=handle)))

    async def abort(self, request_id: str) -> bool:
        """Ends a request by its public id, on whatever frontend it is. Whether there was one."""
        await self.ready()
        answer = await self._ask(core_pb2.FrontendMessage(abort_by_id=core_pb2.AbortById(request_id=request_id)))
        return bool(answer.found)

    async def stats(self, max_requests: int) -> GetStatsResponse:
        """What the service has done, but for its load; also before the first worker."""
        await self._reached()
        question = core_pb2.StatsQuestion(max_requests=max_requests)
        answer = await self._ask(core_pb2.FrontendMessage(stats_question=question))
        stats: GetStatsResponse = answer.stats
        return stats

    async def flush_cache(self) -> bool:
        """Has every cached prefix forgotten; False while a request is live anywhere."""
        await self.ready()
        answer = await self._ask(core_pb2.FrontendMessage(flush_cache=core_pb2.FlushCache()))
        return bool(answer.flushed)

    async def _ask(self, message: core_pb2.FrontendMessage) -> Any:
        """The core's answer to a question, which gets its number here. Raises Unavailable where the core dies first."""
        self._last_question = number = self._last_question % _MAX_HANDLE + 1
        kind = message.WhichOneof("kind")
        assert kind is not None
        getattr(message, kind).question = number
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        self._send(message)
        try:
            return await answer
        finally:
            self._questions.pop(number, None)

    def request_ended(self, request: RequestStats) -> None:
        """For the core's statistics, which go without it while the core is away."""
        self._send(core_pb2.FrontendMessage(request_ended=request))

    def watch_cache(self, listener: CacheListener | None) -> None:
        """Begins telling the listener what is cached, from the beginning; None ends it."""
        self._cache_listener = listener
        watch = core_pb2.WatchCache(watch=listener is not None)
        self._send(core_pb2.FrontendMessage(watch_cache=watch))

    @property
    def held(self) -> int:
        """Entries of all per-request maps: 0 when nothing is live."""
        return len(self._live) + len(self._handles) + len(self._questions)

    def _new_handle(self) -> int:
        self._last_handle = self._last_handle % _MAX_HANDLE + 1
        while self._last_handle in self._live:
            self._last_handle = self._last_handle % _MAX_HANDLE + 1
        return self._last_handle

    def _send_submit(self, sample: Sample) -> None:
        self._send(core_pb2.FrontendMessage(submit=sample.submission))
        self._send_mask(sample)

    def _send_mask(self, sample: Sample) -> None:
        """What a constrained sample may sample next, once that is known and as long as it is of use."""
        handle, constraint = self._handles.get(sample), sample.constraint
        if handle is not None and constraint is not None and constraint.mask is not None:
            mask = core_pb2.MaskReady(handle=handle, position=len(sample.output), allowed=constraint.mask)
            self._send(core_pb2.FrontendMessage(mask_ready=mask))

    def _send(self, message: core_pb2.FrontendMessage) -> None:
        """While the core is away nothing is sent: what lives is submitted when it comes back."""
        if self._writer is None:
            return
        try:
            write_message(self._writer, message.SerializeToString())
        except FramingError as error:
            _log.warning("core disconnected", reason=str(error))
            self._writer.transport.abort()

    def _handle(self, message: core_pb2.CoreMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "tokens":
            self._deliver(message.tokens)
        elif kind == "state":
            self._set_state(message.state)
        elif kind == "abort_answer":
            self._answered(message.abort_answer)
        elif kind == "stats_answer":
            self._answered(message.stats_answer)
        elif kind == "flush_answer":
            self._answered(message.flush_answer)
        elif kind == "cache_news" and self._cache_listener is not None:
            self._cache_listener.cache_news(message.cache_news)

    def _answered(self, answer: core_pb2.AbortAnswer | core_pb2.StatsAnswer | core_pb2.FlushAnswer) -> None:
        waiting = self._questions.get(answer.question)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _set_state(self, state: core_pb2.CoreState | None) -> None:
        self.state = state
        self.repeat()
        if state is None:
            self._ready.clear()
            return
        self._led_term = state.peer.term if state.peer.leading else None
        if state.HasField("model"):
            self._model = state.model
        if self._model.vocabulary_size or state.standby:
            self._ready.set()
        else:
            self._ready.clear()
        if not self._model.vocabulary_size:  # also to a standby, which has refused those that it was told of
            self._send(core_pb2.FrontendMessage(waiting=core_pb2.Waiting(requests=self._waiting)))

    def repeat(self) -> None:
        """Who waits for news is told the state again."""
        self._told += 1
        self._news.set()
        self._news = asyncio.Event()

    async def next_state(self, seen: int) -> int:
        """Waits until `state` was set more than `seen` times; how often it was."""
        while self._told <= seen:
            await self._news.wait()
        return self._told

    def _deliver(self, batch: core_pb2.TokenBatch) -> None:
        """A handle without a sample was cancelled while its tokens were on their way."""
        tokens = read_tokens(batch, self._model.vocabulary_size)
        at, now = batch.time_us / 1e6, time.monotonic()
        for started in batch.started:
            if (sample := self._live.get(started.handle)) is not None:
                sample.started(started.cached_tokens)
                sample.timeline.started(at)
        for requeued in batch.requeued:
            if (sample := self._live.get(requeued.handle)) is not None:
                sample.timeline.requeued(_CAUSES.get(requeued.cause, WORKER_LOST), at)
        for prompt in batch.prompt_logprobs:
            if (sample := self._live.get(prompt.handle)) is not None:
                sample.push_prompt(prompt.entries)
        for handle, token_id, logprobs in tokens:
            sample = self._live.get(handle)
            if sample is None:
                continue
            if (gap := sample.timeline.token(now)) is not None:
                self.gaps.observe(gap)
            if not sample.push(token_id, logprobs):
                self.cancel((sample,))
        for ended in batch.ended:
            sample = self._live.pop(ended.handle, None)
            if sample is not None:
                del self._handles[sample]
                sample.ended(ended)
