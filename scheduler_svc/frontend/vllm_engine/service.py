"""VllmEngine's calls: what a gateway asks of an engine, answered from GenerationService and the core's last word."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from scheduler_svc.frontend.cache_feed import CacheFeed
from scheduler_svc.frontend.core_link import CoreLink
from scheduler_svc.frontend.health import Health
from scheduler_svc.frontend.service import GenerationService
from scheduler_svc.frontend.vllm_engine import kv_events, tokenizer_bundle
from scheduler_svc.frontend.vllm_engine.requests import to_generate_request
from scheduler_svc.frontend.vllm_engine.responses import Responses
from shared import __version__
from shared.errors import InvalidRequest, NotReplayable
from shared.model_config import ModelConfig, SamplingDefaults
from shared.tokens import caller

FLUSH_POLL_S = 0.05
_MODEL_TYPES = {"Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe"}


class VllmEngine(vllm_engine_pb2_grpc.VllmEngineServicer):
    """One frontend as an engine behind a gateway."""

    def __init__(
        self,
        folder: Path,
        model: ModelConfig,
        defaults: SamplingDefaults,
        generation: GenerationService,
        link: CoreLink,
        health: Health,
        *,
        thinks: bool,
    ) -> None:
        """`folder` is the model's; `defaults` are for the gateway to apply where a request is silent; `thinks`: it has
        marks for thoughts."""
        self._folder = folder
        self._model = model
        self._defaults = defaults
        self._generation = generation
        self._link = link
        self._health = health
        self._thinks = thinks
        self._cache = CacheFeed(link)
        self._started = time.monotonic()

    async def Generate(self, request: vllm.GenerateRequest, context: Any) -> AsyncIterator[vllm.GenerateResponse]:
        responses = Responses(request)
        async with aclosing(self._generation.Generate(to_generate_request(request), context)) as stream:
            async for response in stream:
                for message in responses.convert(response):
                    yield message

    async def Abort(self, request: vllm.AbortRequest, context: Any) -> vllm.AbortResponse:
        """Ids that are not live are passed over: a request may end while its gateway gives it up."""
        scoped = caller.get().scoped
        await asyncio.gather(*(self._link.abort(scoped(request_id)) for request_id in request.request_ids))
        return vllm.AbortResponse()

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: Any) -> vllm.HealthCheckResponse:
        healthy = self._health.is_ready and self._health.is_active
        return vllm.HealthCheckResponse(healthy=healthy, message="" if healthy else "no requests are served now")

    async def GetModelInfo(self, request: vllm.GetModelInfoRequest, context: Any) -> vllm.GetModelInfoResponse:
        served = await self._link.ready()
        folder = str(self._folder.resolve())
        return vllm.GetModelInfoResponse(
            model_path=folder,
            is_generation=True,
            max_context_length=served.context_limit,
            vocab_size=served.vocabulary_size,
            served_model_name=self._model.name,
            tokenizer_path=folder,
            model_type=_MODEL_TYPES[self._model.architecture],
            architectures=[self._model.architecture],
            eos_token_ids=served.eos_token_ids,
            max_req_input_len=served.context_limit - 1,
            default_sampling_params_json=json.dumps(asdict(self._defaults)),
        )

    async def GetServerInfo(self, request: vllm.GetServerInfoRequest, context: Any) -> vllm.GetServerInfoResponse:
        served, state = await self._link.ready(), self._link.serving_state()
        return vllm.GetServerInfoResponse(
            active_requests=state.running + state.queued,
            uptime_seconds=time.monotonic() - self._started,
            server_type="tandem",
            data_parallel_size=1,
            block_size=served.block_size,
            model_dtype=served.dtype,
            max_num_seqs=state.max_running,
            engine_reasoning_parser="qwen3" if self._thinks else "",
            constrained_decoding_start="after_reasoning" if self._thinks else "first_token",
        )

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: Any) -> vllm.GetLoadsResponse:
        """One rank: whatever worker groups there are, requests are placed here and not by the gateway."""
        served, state = await self._link.ready(), self._link.serving_state()
        total = sum(group.total_blocks for group in state.groups)
        used = total - sum(group.free_blocks for group in state.groups)
        load = vllm.SchedulerLoad(
            num_running_reqs=state.running,
            num_waiting_reqs=state.queued,
            num_total_reqs=state.running + state.queued,
            num_used_tokens=used * served.block_size,
            max_total_num_tokens=total * served.block_size,
            token_usage=used / total if total else 0.0,
            utilization=state.running / state.max_running if state.max_running else 0.0,
            max_running_requests=state.max_running,
        )
        now = datetime.now(UTC).isoformat()
        return vllm.GetLoadsResponse(timestamp=now, version=__version__, dp_rank_count=1, loads=[load])

    async def GetTokenizer(
        self, request: common.GetTokenizerRequest, context: Any
    ) -> AsyncIterator[common.GetTokenizerChunk]:
        archive = await asyncio.to_thread(tokenizer_bundle.bundle, self._folder)
        for chunk in tokenizer_bundle.chunks(archive):
            yield chunk

    async def SubscribeKvEvents(
        self, request: common.SubscribeKvEventsRequest, context: Any
    ) -> AsyncIterator[common.KvEventBatch]:
        if request.start_sequence_number:
            raise NotReplayable("no past batches are kept: subscribe from 0 to be told all that is cached")
        await context.send_initial_metadata(
            ()
        )  # the subscriber waits for it, and the first batch may be long in coming
        with self._cache.follow() as follower:
            async with aclosing(kv_events.batches(follower)) as stream:
                async for batch in stream:
                    yield batch

    async def FlushCache(self, request: common.FlushCacheRequest, context: Any) -> common.FlushCacheResponse:
        if not 0 <= request.timeout_s < float("inf"):
            raise InvalidRequest("timeout_s", f"must be at least 0 and finite, is {request.timeout_s}")
        deadline = time.monotonic() + request.timeout_s
        while True:
            if await self._link.flush_cache():
                return common.FlushCacheResponse(success=True)
            if time.monotonic() >= deadline:
                return common.FlushCacheResponse(success=False, message="requests are in flight")
            await asyncio.sleep(FLUSH_POLL_S)
