"""The client library for asyncio: what tandem.client says for threads."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from shared.dialer import Dialer
from shared.pb import generation_pb2 as pb
from shared.security import PLAIN, ClientSecurity
from tandem.activity import AsyncActivity
from tandem.client import CONNECTIONS, DEFAULT_ENDPOINT, QUEUE_TIMEOUT_S, RESUME_TIMEOUT_S
from tandem.connections import Asking, Connections, error_of, for_names
from tandem.requests import ChatOptions, GenerateOptions, Prompt, generate_request, tokenize_request
from tandem.streams import AsyncGenerationStream
from tandem.values import (
    Completion,
    Load,
    ModelInfo,
    Stats,
    completion_from,
    load_from_pb,
    model_info_from_pb,
    stats_from_pb,
)


class AsyncClient:
    """A server's services, for asyncio. Close it, or use it as an async context manager. Arguments as of Client."""

    def __init__(
        self,
        endpoint: str | Sequence[str] = DEFAULT_ENDPOINT,
        connections: int = CONNECTIONS,
        *,
        security: ClientSecurity = PLAIN,
        resume_timeout: float = RESUME_TIMEOUT_S,
        queue_timeout: float = QUEUE_TIMEOUT_S,
        timeout: float | None = None,
    ) -> None:
        """Connects when first used; call it in a running loop. Raises what Client raises."""
        dialer = Dialer(for_names(security, endpoint))
        self._connections = Connections(endpoint, connections, dialer, dialer.channel, AsyncActivity)
        self._patience = resume_timeout, queue_timeout
        self._timeout = timeout

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncGenerationStream:
        """Continues a prompt and streams it."""
        request = generate_request(prompt, **options)
        return AsyncGenerationStream(self._connections, request, options.get("timeout"), *self._patience)

    async def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Continues a prompt and waits for all of it."""
        stream = self.generate(prompt, **options)
        return completion_from(stream.request_id, stream.seed, [delta async for delta in stream])

    async def tokenize(self, prompt: Prompt, **options: Unpack[ChatOptions]) -> list[int]:
        """Token ids that generate() would compute for text or a conversation."""
        return list((await self._ask("Tokenize", tokenize_request(prompt, **options))).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no whole character become U+FFFD."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return str((await self._ask("Detokenize", request)).text)

    async def model_info(self) -> ModelInfo:
        """Which model is served."""
        return model_info_from_pb(await self._ask("GetModelInfo", pb.GetModelInfoRequest()))

    async def load(self) -> Load:
        """How busy the service is; of several endpoints, the next that answers."""
        return load_from_pb(await self._ask("GetLoad", pb.GetLoadRequest()))

    async def stats(self, max_requests: int = 0) -> Stats:
        """What the service has done, and how its latest requests went, at most 256."""
        return stats_from_pb(await self._ask("GetStats", pb.GetStatsRequest(max_requests=max_requests)))

    async def abort(self, request_id: str) -> bool:
        """Ends a live request, whoever started it, at whichever endpoint. Whether there was one."""
        request = pb.AbortRequest(request_id=request_id)
        return bool((await self._ask("Abort", request, good_enough=lambda answer: answer.found)).found)

    async def _ask(self, method: str, request: Any, good_enough: Callable[[Any], bool] = lambda answer: True) -> Any:
        asking, metadata = Asking(good_enough), self._connections.metadata
        for stub in self._connections.each():
            try:
                if asking.is_settled_by(await getattr(stub, method)(request, timeout=self._timeout, metadata=metadata)):
                    break
            except grpc.RpcError as error:
                reason = error_of(error, self._connections.security)
                self._connections.failed(stub, reason)
                asking.failed(reason)
        return asking.answer()

    async def close(self) -> None:
        """Ends every request that still runs."""
        for channel in self._connections.channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
