"""Every edge of a process, with what may come in there. What an edge raises is a bug: it swallows what it may raise."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError, Message
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core import CoreConfig, Request, Scheduler
from scheduler_svc.election import Election
from scheduler_svc.fitting import MOST, MOST_TOKENS, core_config, foreign
from scheduler_svc.frontend.bounds import checked_ids
from scheduler_svc.frontend.config import FrontendConfig
from scheduler_svc.frontend.grammars import grammar_of
from scheduler_svc.frontend.prompts import Prompts, tools_of
from scheduler_svc.frontend.validation import check_request, submissions
from scheduler_svc.frontend.vllm_engine.requests import to_generate_request
from scheduler_svc.metrics_hub import MetricsHub
from scheduler_svc.peers import claim_from_pb, claim_to_pb
from scheduler_svc.snapshots import decode
from shared.errors import InvalidRequest, ProtocolError, StartupError, TandemError
from shared.framing import FramingError, read_message
from shared.model_config import load_model_config
from shared.pb import core_pb2, peer_pb2, worker_pb2
from shared.pb import generation_pb2 as pb
from shared.rpc import RETRY_AFTER
from shared.security import PLAIN
from shared.types import IntArray
from shared.wire import description_from_pb, result_from_pb, result_to_pb
from tandem.connections import error_of
from tandem.models import model_folder
from tandem.resume import Progress
from tandem.values import completion_from
from tests.core.reference_worker import VOCABULARY_SIZE, ReferenceWorker
from tests.fuzz import samples
from tests.fuzz.core_edge import LENGTH, CoreEdge
from tests.fuzz.link_edge import LinkEdge
from tests.fuzz.messages import damaged, messages
from tests.fuzz.worker_edge import WorkerEdge

INTERNAL = grpc.StatusCode.INTERNAL.value[0]


@dataclass(frozen=True, slots=True)
class Edge:
    """What may come in at one edge, and what takes it."""

    inputs: st.SearchStrategy[Any]
    take: Callable[[Any], object]


def _may_raise(*kinds: type[Exception]) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """What an edge names."""

    def wrap(take: Callable[..., object]) -> Callable[..., None]:
        def call(*values: Any) -> None:
            with contextlib.suppress(*kinds):
                take(*values)

        return call

    return wrap


# Frames: between frontend and core, and from both to their parent.


@_may_raise(FramingError)
def _frames(data: bytes) -> None:
    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        while await read_message(reader) is not None:
            pass

    asyncio.run(read())


@_may_raise(ValueError)
def _metrics(data: bytes) -> None:
    snapshot, hub = decode(data), MetricsHub()
    child = hub.opened()
    hub.told(child, snapshot)
    hub.told(child, snapshot)
    hub.closed(child)
    list(hub.read())


# The core and its workers.


class _Results:
    """A core with plans out; the result of the first one comes damaged, then as it is."""

    def __init__(self) -> None:
        self._core = Scheduler(
            CoreConfig(
                vocabulary_size=VOCABULARY_SIZE,
                max_model_length=32,
                block_size=2,
                max_num_seqs=4,
                max_num_batched_tokens=16,
                hash_seed=1,
            )
        )
        self._core.worker_ready(0, 32)
        self._worker = ReferenceWorker(32, 2, 4)
        for key, logprobs in enumerate((None, 0, 2)):
            prompt = np.array([1, 2, key + 1], dtype=np.int32)
            self._core.submit(Request(key, str(key), 0, prompt, logprobs=logprobs, prompt_logprobs=logprobs))
        self._core.update(0, self._worker.execute(self._core.heartbeat(0)))
        plan = self._core.schedule(0)
        assert plan is not None
        self._right = self._worker.execute(plan)

    @property
    def right(self) -> worker_pb2.StepResult:
        """The result that is due."""
        return result_to_pb(self._right, 1)

    @classmethod
    def once(cls, data: bytes) -> None:
        """In place of that one."""
        cls().take(data)

    def take(self, data: bytes) -> None:
        """Refused with nothing changed, or taken."""
        try:
            self._core.update(0, result_from_pb(worker_pb2.StepResult.FromString(data)))
        except (DecodeError, ValueError, ProtocolError):
            self._core.update(0, self._right)
        self._core.check_invariants()


@_may_raise(DecodeError, ValueError, StartupError)
def _descriptions(data: bytes) -> None:
    """Of the same model: another one is refused whatever else it says."""
    description = description_from_pb(worker_pb2.DescribeResponse.FromString(data))
    config = SchedulerConfig(Path(), ("127.0.0.1:1",))
    if foreign(description, config, description.fingerprint):
        return
    core_config(config, description, 1)
    assert description.num_blocks <= MOST["num_blocks"]
    assert description.max_num_seqs * description.max_model_length <= MOST_TOKENS


@_may_raise(DecodeError)
def _peers(messages: list[bytes]) -> None:
    """What a scheduler says of itself after it has heard these."""
    election = Election(7, 2.0, 0.0, alone=False)
    election.addresses(["peer"], 0.0)
    try:
        for number, data in enumerate(messages):
            election.heard("peer", claim_from_pb(peer_pb2.PeerState.FromString(data)), float(number))
    finally:
        for at in range(10, 20):
            election.workers(float(at), connected=True, complete=True, held=False, reaching=True)
            claim_to_pb(election.claim)


# Clients, and the gateways of others.


class _Requests:
    """A frontend's checks with the core behind them: what they let pass, the core and its worker take."""

    def __init__(self) -> None:
        folder = model_folder("tiny")
        self._prompts = Prompts(FrontendConfig(folder, Path()))
        self._model = core_pb2.ServedModel(context_limit=LENGTH, vocabulary_size=VOCABULARY_SIZE, eos_token_ids=[0])
        self._defaults = load_model_config(folder).sampling_defaults
        self._core = CoreEdge()

    @_may_raise(DecodeError, InvalidRequest)
    def own(self, data: bytes) -> None:
        """Of Tandem's clients."""
        self._take(pb.GenerateRequest.FromString(data))

    @_may_raise(DecodeError, InvalidRequest)
    def gateways(self, data: bytes) -> None:
        """Of the protocol of gateways."""
        self._take(to_generate_request(vllm.GenerateRequest.FromString(data)))

    def _take(self, request: pb.GenerateRequest) -> None:
        check_request(request, self._model)
        prompt = self._prompt(request)
        words = asyncio.run(self._prompts.encode_words(request.sampling.bad_words))
        fitting = [tuple(token % VOCABULARY_SIZE for token in word) for word in words]
        submits = submissions(request, "name", 1, prompt, fitting, self._model, self._defaults)
        if submits[0].constrained:
            grammar_of(request.constraint, tools_of(request.chat))
        for handle, submit in enumerate(submits[:2]):
            submit.handle, submit.constrained = handle, False
        told = self._core.take([core_pb2.FrontendMessage(submit=one).SerializeToString() for one in submits[:2]])
        ends = [ended for message in told for ended in message.tokens.ended]
        assert not any(ended.failure.code == INTERNAL for ended in ends), ends

    def _prompt(self, request: pb.GenerateRequest) -> IntArray:
        """The core's vocabulary is smaller than the tokenizer's."""
        if request.WhichOneof("prompt") == "token_ids":
            return checked_ids("token_ids", request.token_ids.ids, VOCABULARY_SIZE)
        ids = asyncio.run(self._prompts.encode(request))
        return (ids % VOCABULARY_SIZE).astype(np.int32)


@_may_raise(DecodeError, TandemError)
def _responses(messages: list[bytes]) -> None:
    """What a client makes of a stream, whoever sent it."""
    progress = Progress(pb.GenerateRequest(text="a", n=2, sampling=pb.SamplingParams(seed=1)))
    deltas = []
    for data in messages:
        progress.remaining()
        deltas.append(progress.take(pb.GenerateResponse.FromString(data)))
    progress.check_finished()
    completion_from("name", 1, deltas)


def _errors(error: tuple[int, str, str]) -> None:
    """What a client makes of a call's end, whoever ended it."""
    code, details, retry_after = error
    status = SimpleNamespace(
        code=lambda: SimpleNamespace(value=(code,)),
        details=lambda: details,
        trailing_metadata=lambda: ((RETRY_AFTER, retry_after),),
    )
    assert isinstance(error_of(status, PLAIN), TandemError)


def _any(kind: type[Message], *bases: Message) -> st.SearchStrategy[bytes]:
    whole = messages(kind, *bases)
    return whole | damaged(whole)


def _lists(kind: type[Message], *bases: Message) -> st.SearchStrategy[list[bytes]]:
    return st.lists(_any(kind, *bases), max_size=4)


_snapshots = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=20,
).map(lambda value: json.dumps(value).encode())
_snapshot = json.dumps([("a", "counter", "", [(("a_total", [("worker", "b")]), 1.0)])]).encode()
_frame = st.binary(max_size=9).map(lambda data: len(data).to_bytes(4, "little") + data)


@cache
def edge(name: str) -> Edge:
    """One of EDGES; some take a moment to make."""
    return EDGES[name]()


EDGES: dict[str, Callable[[], Edge]] = {
    "frames": lambda: Edge(st.lists(_frame | st.binary(max_size=9), max_size=5).map(b"".join), _frames),
    "metrics": lambda: Edge(_snapshots | damaged(_snapshots | st.just(_snapshot)), _metrics),
    "frontend messages at the core": lambda: Edge(
        _lists(core_pb2.FrontendMessage, *samples.FRONTEND_MESSAGES), CoreEdge().take
    ),
    "core messages at a frontend": lambda: Edge(_lists(core_pb2.CoreMessage, *samples.CORE_MESSAGES), LinkEdge().take),
    "plans at a worker": lambda: Edge(_lists(worker_pb2.StepPlan, *samples.PLANS), WorkerEdge().take),
    "results at the core": lambda: Edge(_any(worker_pb2.StepResult, _Results().right), _Results.once),
    "peers at a scheduler": lambda: Edge(_lists(peer_pb2.PeerState, samples.PEER), _peers),
    "descriptions of workers": lambda: Edge(_any(worker_pb2.DescribeResponse, samples.DESCRIPTION), _descriptions),
    "requests": lambda: Edge(_any(pb.GenerateRequest, *samples.REQUESTS), _Requests().own),
    "requests of gateways": lambda: Edge(_any(vllm.GenerateRequest, *samples.GATEWAY_REQUESTS), _Requests().gateways),
    "responses at a client": lambda: Edge(_lists(pb.GenerateResponse, *samples.RESPONSES), _responses),
    "errors at a client": lambda: Edge(st.tuples(st.integers(-1, 20), st.text(), st.text(max_size=4)), _errors),
}
