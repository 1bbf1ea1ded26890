"""The client library: Client for threads, AsyncClient for asyncio. Both say the same things in the same words.

One HTTP/2 connection is one frontend process of the server, so a client opens several and takes them in turn.
Whatever the server refuses or fails at is raised as the kind of shared.errors that the server raised.
"""

import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import grpc

from shared.errors import TandemError
from shared.pb import generation_pb2 as pb
from shared.pb import generation_pb2_grpc as rpc
from shared.rpc import CHANNEL_OPTIONS, RETRY_AFTER, error_from_status, make_channel
from tandem.requests import ChatOptions, GenerateOptions, Prompt, generate_request, tokenize_request
from tandem.values import (
    Completion,
    Delta,
    Load,
    ModelInfo,
    completion_from,
    delta_from_pb,
    load_from_pb,
    model_info_from_pb,
)

if TYPE_CHECKING:
    from shared.pb.generation_pb2_grpc import GenerationServiceAsyncStub

DEFAULT_ENDPOINT = "127.0.0.1:50051"
CONNECTIONS = 4


class _Stream:
    """What both kinds of stream know of their request."""

    def __init__(self, call: Any, request_id: str) -> None:
        self.request_id = request_id
        self.seed: int | None = None
        """The effective seed, known from the first delta on."""
        self._call = call

    def _delta(self, response: pb.GenerateResponse) -> Delta:
        if self.seed is None:
            self.seed = response.seed
        return delta_from_pb(response)

    def close(self) -> None:
        """Ends the request at the server if it still runs."""
        self._call.cancel()


class GenerationStream(_Stream):
    """The deltas of one request. Leaving the loop early, or close(), ends the request at the server."""

    def __iter__(self) -> Iterator[Delta]:
        try:
            for response in self._call:
                yield self._delta(response)
        except grpc.RpcError as error:
            raise _error(error) from None
        finally:
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncGenerationStream(_Stream):
    """The deltas of one request. Leaving the loop early, or close(), ends the request at the server."""

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            async for response in self._call:
                yield self._delta(response)
        except grpc.RpcError as error:
            raise _error(error) from None
        finally:
            self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client:
    """A server's services, for threads. Safe to share between them; close it, or use it as a context manager."""

    def __init__(self, endpoint: str = DEFAULT_ENDPOINT, connections: int = CONNECTIONS) -> None:
        """`endpoint` is host:port or another gRPC target. Connects when first used."""
        self._channels = [grpc.insecure_channel(endpoint, options=CHANNEL_OPTIONS) for _ in range(connections)]
        self._stubs = itertools.cycle([rpc.GenerationServiceStub(channel) for channel in self._channels])

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerationStream:
        """Continues a prompt and streams it."""
        request = generate_request(prompt, **options)
        call = next(self._stubs).Generate(request, timeout=options.get("timeout"))
        return GenerationStream(call, request.request_id)

    def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Continues a prompt and waits for all of it."""
        stream = self.generate(prompt, **options)
        deltas = list(stream)
        return completion_from(stream.request_id, stream.seed or 0, deltas)

    def tokenize(self, prompt: Prompt, **options: Unpack[ChatOptions]) -> list[int]:
        """Token ids that generate() would compute for text or a conversation."""
        return list(self._ask("Tokenize", tokenize_request(prompt, **options)).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no whole character become U+FFFD."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return str(self._ask("Detokenize", request).text)

    def model_info(self) -> ModelInfo:
        """Which model is served."""
        return model_info_from_pb(self._ask("GetModelInfo", pb.GetModelInfoRequest()))

    def load(self) -> Load:
        """How busy the service is."""
        return load_from_pb(self._ask("GetLoad", pb.GetLoadRequest()))

    def abort(self, request_id: str) -> bool:
        """Ends a live request, whoever started it. Whether there was one."""
        return bool(self._ask("Abort", pb.AbortRequest(request_id=request_id)).found)

    def _ask(self, method: str, request: Any) -> Any:
        try:
            return getattr(next(self._stubs), method)(request)
        except grpc.RpcError as error:
            raise _error(error) from None

    def close(self) -> None:
        """Ends every request that still runs."""
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """A server's services, for asyncio. Close it, or use it as an async context manager."""

    def __init__(self, endpoint: str = DEFAULT_ENDPOINT, connections: int = CONNECTIONS) -> None:
        """`endpoint` is host:port or another gRPC target. Connects when first used. Call it in a running loop."""
        self._channels = [make_channel(endpoint) for _ in range(connections)]
        stubs: list[GenerationServiceAsyncStub] = [rpc.GenerationServiceStub(channel) for channel in self._channels]
        self._stubs = itertools.cycle(stubs)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncGenerationStream:
        """Continues a prompt and streams it."""
        request = generate_request(prompt, **options)
        call = next(self._stubs).Generate(request, timeout=options.get("timeout"))
        return AsyncGenerationStream(call, request.request_id)

    async def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Continues a prompt and waits for all of it."""
        stream = self.generate(prompt, **options)
        deltas = [delta async for delta in stream]
        return completion_from(stream.request_id, stream.seed or 0, deltas)

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
        """How busy the service is."""
        return load_from_pb(await self._ask("GetLoad", pb.GetLoadRequest()))

    async def abort(self, request_id: str) -> bool:
        """Ends a live request, whoever started it. Whether there was one."""
        return bool((await self._ask("Abort", pb.AbortRequest(request_id=request_id))).found)

    async def _ask(self, method: str, request: Any) -> Any:
        try:
            return await getattr(next(self._stubs), method)(request)
        except grpc.RpcError as error:
            raise _error(error) from None

    async def close(self) -> None:
        """Ends every request that still runs."""
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _error(error: Any) -> TandemError:
    """The server's error; also what gRPC itself reports, as the kind that has its status code."""
    trailers = dict(error.trailing_metadata() or ())
    return error_from_status(error.code().value[0], error.details() or "", int(trailers.get(RETRY_AFTER, 0)))
