"""The public gRPC service: one coroutine per call, which is that call's only writer.

Converts protobuf at this edge. Errors are raised by kind and become status codes in the interceptor.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from scheduler_svc.frontend.attempts import Attempts
from scheduler_svc.frontend.bounds import checked_ids
from scheduler_svc.frontend.clients import client_of
from scheduler_svc.frontend.constraint import Constraint, MinTokens
from scheduler_svc.frontend.core_link import CoreLink
from scheduler_svc.frontend.generation import Generation, skips_special_tokens
from scheduler_svc.frontend.grammar_compiler import GrammarCompiler
from scheduler_svc.frontend.grammars import grammar_of
from scheduler_svc.frontend.prompts import Prompts, tools_of
from scheduler_svc.frontend.record import Record
from scheduler_svc.frontend.request_counts import CANCELLED, DEADLINE_EXCEEDED, RequestCounts
from scheduler_svc.frontend.seeds import random_seed
from scheduler_svc.frontend.tracing import Tracing
from scheduler_svc.frontend.validation import check_request, submissions
from shared import __version__
from shared.errors import InvalidRequest, Unavailable
from shared.model_config import ModelConfig, SamplingDefaults
from shared.pb import core_pb2, generation_pb2_grpc
from shared.pb import generation_pb2 as pb
from shared.rpc import REQUEST_ID
from shared.tokens import caller
from shared.types import IntArray
from shared.wire import unpack


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Generate and what a client needs around it."""

    def __init__(
        self,
        model: ModelConfig,
        defaults: SamplingDefaults,
        prompts: Prompts,
        grammars: GrammarCompiler,
        link: CoreLink,
        tracing: Tracing,
        fair_by: str | None = None,
    ) -> None:
        """`defaults` answer where a request is silent about sampling; `fair_by` tells clients apart, see clients."""
        self._model = model
        self._defaults = defaults
        self._prompts = prompts
        self._grammars = grammars
        self._link = link
        self._tracing = tracing
        self._fair_by = fair_by
        self.counts = RequestCounts()
        self._attempts = Attempts()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.live = 0
        """Generate calls in progress."""

    async def drain(self) -> None:
        """Refuses new calls and waits for the running ones."""
        self._draining = True
        await self._idle.wait()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncGenerator[pb.GenerateResponse, None]:
        self._refuse_if_draining()
        trace = self._tracing.begin(context.invocation_metadata())
        request_id = request.request_id or uuid.uuid4().hex
        record = Record(caller.get().scoped(request_id), trace, self.counts, self._attempts)
        self.live += 1
        self._idle.clear()
        try:
            generation = await self._start(request, request_id, record, client_of(context, self._fair_by))
            try:
                accepted = ((REQUEST_ID, request_id.encode()),)
                context.set_trailing_metadata(accepted)
                await context.send_initial_metadata(accepted)
                while (response := await generation.next()) is not None:
                    record.count(response)
                    yield response
            finally:
                self._link.cancel(generation.samples)
        except Exception as error:
            record.failed(error)
            raise
        finally:
            self.live -= 1
            if not self.live:
                self._idle.set()
            if record.outcome == CANCELLED and _is_late(context):
                record.outcome = DEADLINE_EXCEEDED
            if (ended := record.close()) is not None:
                self._link.request_ended(ended)

    def _refuse_if_draining(self) -> None:
        if self._draining:
            raise Unavailable("this server shuts down; try another")

    async def _start(self, request: pb.GenerateRequest, request_id: str, record: Record, client: str) -> Generation:
        model = await self._link.ready(queues=True)
        check_request(request, model)
        request.cache_salt = caller.get().scoped(request.cache_salt)
        prompt = await self._prompt(request, model)
        seed = request.sampling.seed if request.sampling.HasField("seed") else random_seed()
        bad_words = await self._prompts.encode_words(request.sampling.bad_words)
        samples = submissions(request, record.request_id, seed, prompt, bad_words, model, self._defaults)
        for submission in samples:
            submission.client = client
        constraints = await self._constraints(request, prompt, samples, model) if samples[0].constrained else ()
        first = pb.GenerateResponse(request_id=request_id, seed=seed)
        if request.output.echo and not request.output_token_ids.ids:
            first.echo.text = await self._prompts.decode(prompt.tolist(), skips_special_tokens(request))
            first.echo.token_ids.extend(prompt.tolist())
        generation = Generation(samples, first, self._prompts.vocabulary, request, constraints)
        record.accepted(prompt.size, generation.samples)
        self._link.submit(sample for sample in generation.samples if sample.finish is None)
        return generation

    async def _prompt(self, request: pb.GenerateRequest, model: core_pb2.ServedModel) -> IntArray:
        if request.WhichOneof("prompt") == "token_ids":
            return checked_ids("token_ids", request.token_ids.ids, model.vocabulary_size)
        return await self._prompts.encode(request)

    async def _constraints(
        self,
        request: pb.GenerateRequest,
        prompt: IntArray,
        samples: Sequence[core_pb2.Submit],
        model: core_pb2.ServedModel,
    ) -> list[Constraint]:
        """One for each sample. Raises InvalidRequest for a bad grammar, or for given output that it does not allow."""
        grammar = grammar_of(request.constraint, tools_of(request.chat))
        stops = unpack(samples[0].stop_token_ids).tolist()
        min_tokens = MinTokens.of(request.stopping.min_tokens, stops, model.vocabulary_size)
        thinks = not request.constraint.enable_in_reasoning and self._prompts.thoughts.is_open_after(prompt.tolist())
        thought_end = self._prompts.thoughts.end if thinks else None
        constraint = await self._grammars.begin(grammar, min_tokens, unpack(samples[0].output).tolist(), thought_end)
        return [constraint, *(constraint.copy() for _ in samples[1:])]

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        if not request.request_id:
            raise InvalidRequest("request_id", "must not be empty")
        return pb.AbortResponse(found=await self._link.abort(caller.get().scoped(request.request_id)))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        if request.WhichOneof("prompt") is None:
            raise InvalidRequest("prompt", "one of text and chat is required")
        return pb.TokenizeResponse(token_ids=(await self._prompts.encode(request)).tolist())

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        model = await self._link.ready()
        token_ids = checked_ids("token_ids", request.token_ids, model.vocabulary_size).tolist()
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        return pb.DetokenizeResponse(text=await self._prompts.decode(token_ids, skip))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        served = await self._link.ready()
        return pb.GetModelInfoResponse(
            model_name=self._model.name,
            fingerprint=self._model.fingerprint,
            architecture=self._model.architecture,
            vocabulary_size=served.vocabulary_size,
            max_context_length=served.context_limit,
            eos_token_ids=served.eos_token_ids,
            dtype=served.dtype,
            server_version=__version__,
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:
        return self._load()

    def _load(self) -> pb.GetLoadResponse:
        state = self._link.serving_state()
        names = ("endpoint", "connected", "running", "total_blocks", "free_blocks", "draining", "problem", "refused")
        return pb.GetLoadResponse(
            queued=state.queued,
            running=state.running,
            max_running=state.max_running,
            workers=[pb.WorkerLoad(**{name: getattr(group, name) for name in names}) for group in state.groups],
        )

    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:
        stats = await self._link.stats(request.max_requests)
        stats.load.CopyFrom(self._load())
        return stats


def _is_late(context: Any) -> bool:
    """Whether the caller's deadline has passed: gRPC cancels the call then as if the caller had left."""
    left = context.time_remaining()
    return left is not None and left <= 0
