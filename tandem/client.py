"""The client library for threads. tandem.async_client says the same things in the same words, for asyncio.

Whatever the server refuses or fails at is raised as the kind of shared.errors that the server raised.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from shared.dialer import Dialer
from shared.pb import generation_pb2 as pb
from shared.security import PLAIN, ClientSecurity
from tandem.activity import ThreadActivity
from tandem.connections import Asking, Connections, error_of, for_names
from tandem.requests import ChatOptions, GenerateOptions, Prompt, generate_request, tokenize_request
from tandem.streams import GenerationStream
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

DEFAULT_ENDPOINT = "127.0.0.1:50051"
CONNECTIONS = 4
RESUME_TIMEOUT_S = 60.0
QUEUE_TIMEOUT_S = 30.0


class Client:
    """A server's services, for threads. Safe to share between them; close it, or use it as a context manager.

    A server, or each of several that serve the same model: `endpoint` is host:port, dns:///name:port (all its
    addresses), another gRPC target, or a list of them; those that are active are used in turn. `connections` go to
    each; one connection reaches one frontend process. `security`: TLS, and the token to show. A stream that loses its
    server goes on with the next, for `resume_timeout` seconds without progress; 0: never. One that finds the queue
    full tries again when the server says, for `queue_timeout` seconds. `timeout`, seconds, is for each call but
    generate() and complete(), which have their own; its end raises DeadlineExceeded.
    """

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
        """Connects when first used. ValueError where there is no endpoint or no connection, StartupError for a file of
        `security` that can't be used."""
        dialer = Dialer(for_names(security, endpoint))
        self._connections = Connections(endpoint, connections, dialer, dialer.thread_channel, ThreadActivity)
        self._patience = resume_timeout, queue_timeout
        self._timeout = timeout

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerationStream:
        """Continues a prompt and streams it."""
        request = generate_request(prompt, **options)
        return GenerationStream(self._connections, request, options.get("timeout"), *self._patience)

    def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Continues a prompt and waits for all of it."""
        stream = self.generate(prompt, **options)
        return completion_from(stream.request_id, stream.seed, list(stream))

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
        """How busy the service is; of several endpoints, the next that answers."""
        return load_from_pb(self._ask("GetLoad", pb.GetLoadRequest()))

    def stats(self, max_requests: int = 0) -> Stats:
        """What the service has done, and how its latest requests went, at most 256."""
        return stats_from_pb(self._ask("GetStats", pb.GetStatsRequest(max_requests=max_requests)))

    def abort(self, request_id: str) -> bool:
        """Ends a live request, whoever started it, at whichever endpoint. Whether there was one."""
        request = pb.AbortRequest(request_id=request_id)
        return bool(self._ask("Abort", request, good_enough=lambda answer: answer.found).found)

    def _ask(self, method: str, request: Any, good_enough: Callable[[Any], bool] = lambda answer: True) -> Any:
        asking, metadata = Asking(good_enough), self._connections.metadata
        for stub in self._connections.each():
            try:
                if asking.is_settled_by(getattr(stub, method)(request, timeout=self._timeout, metadata=metadata)):
                    break
            except grpc.RpcError as error:
                reason = error_of(error, self._connections.security)
                self._connections.failed(stub, reason)
                asking.failed(reason)
        return asking.answer()

    def close(self) -> None:
        """Ends every request that still runs."""
        for channel in self._connections.channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
