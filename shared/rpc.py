"""How Tandem speaks gRPC: channel and server options for both services and both ends, and errors as status codes."""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

import grpc
import structlog
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared import errors
from shared.decoding import checked, decoded, handing_on
from shared.ports import address
from shared.reading import Writes

MAX_MESSAGE_BYTES = 64 << 20
POLL_S = 0.05

_log = structlog.get_logger(__name__)

_COMMON: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
]

CHANNEL_OPTIONS = [
    *_COMMON,
    # Four seconds to notice that a server is stopped or out of reach: by then a standby has taken its place.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Not a pause, as the name has it, but how long an attempt to connect may take: farther servers, busy machines, TLS.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # One HTTP/2 connection is one frontend process: channels to the same target must not share one.
    ("grpc.use_local_subchannel_pool", 1),
]

SERVER_OPTIONS = [
    *_COMMON,
    # Without the ping timeout a stopped peer is noticed after a minute, whatever the interval.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    # Clients may ping through minutes without data: otherwise a long prefill ends in GOAWAY too_many_pings.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
]

STATUS_CODES: dict[type[errors.TandemError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.DuplicateRequest: grpc.StatusCode.ALREADY_EXISTS,
    errors.LimitExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Standby: grpc.StatusCode.UNAVAILABLE,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Aborted: grpc.StatusCode.CANCELLED,
    errors.LeaseHeld: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotReplayable: grpc.StatusCode.OUT_OF_RANGE,
    errors.RequestFailed: grpc.StatusCode.INTERNAL,
}
RETRY_AFTER = "grpc-retry-pushback-ms"
"""Trailing metadata that tells a client when to try again; only QueueFull has it."""
DETAILS = "grpc-status-details-bin"
"""The same for clients in other languages: a google.rpc.Status with a RetryInfo."""
ABORTED = "tandem-aborted"
"""Trailing metadata of a call whose request was aborted by its id. One that is CANCELLED without it, and not by its
caller, was ended by a server that had no more time for it, or by something in between."""
ACTIVE_ENDPOINT = "tandem-active-endpoint"
"""Trailing metadata of a standby: host:port of the active scheduler, empty where it is not known."""
REQUEST_ID = "tandem-request-id-bin"
"""Initial metadata of Generate, sent when the request is accepted, which may be long before its first token. A client
that loses its server afterwards may go on elsewhere; one that never got it learns at once that nobody serves. The
trailing metadata have it too: gRPC's asyncio client forgets the initial ones where a call ends as soon as they come."""

_KINDS = {code.value[0]: kind for kind, code in STATUS_CODES.items() if kind is not errors.Standby}


def error_from_status(code: int, message: str, retry_after_ms: int = 0) -> errors.TandemError:
    """The error that a peer reported, by STATUS_CODES. A code of no kind counts as a fault of the service."""
    kind = _KINDS.get(code, errors.RequestFailed)
    if kind is errors.InvalidRequest:
        field, _, problem = message.partition(": ")
        return errors.InvalidRequest(field, problem)
    if kind is errors.QueueFull:
        return errors.QueueFull(message, retry_after_ms) if retry_after_ms else errors.LimitExceeded(message)
    return kind(message)


def _retry_trailers(error: errors.QueueFull) -> tuple[tuple[str, str | bytes], ...]:
    code, milliseconds = STATUS_CODES[errors.QueueFull].value[0], error.retry_after_ms
    hint = error_details_pb2.RetryInfo()
    hint.retry_delay.FromMilliseconds(milliseconds)
    status = status_pb2.Status(code=code, message=str(error))
    status.details.add().Pack(hint)
    return (RETRY_AFTER, str(milliseconds)), (DETAILS, status.SerializeToString())


async def _abort(context: Any, error: Exception) -> None:
    code = STATUS_CODES.get(type(error)) if isinstance(error, errors.TandemError) else None
    if code is None:
        _log.exception("a call failed by a bug", exc_info=error)
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")
    trailers: tuple[tuple[str, str | bytes], ...] = ()
    if isinstance(error, errors.QueueFull):
        trailers = _retry_trailers(error)
    elif isinstance(error, errors.Aborted):
        trailers = ((ABORTED, "by-id"),)
    elif isinstance(error, errors.Standby):
        trailers = ((ACTIVE_ENDPOINT, error.active),)
    await context.abort(code, str(error), (*(context.trailing_metadata() or ()), *trailers))


class ErrorInterceptor(aio.ServerInterceptor):
    """Maps exceptions of every handler to status codes: the only place that does."""

    def __init__(self, read_timeout: float = math.inf) -> None:
        """`read_timeout`: seconds that a client may leave a message of a stream untaken."""
        self._writes = Writes(read_timeout)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler that the call would reach, if there is one."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        kind = next(kind for kind in kinds if getattr(handler, kind))
        behaviour = getattr(handler, kind)
        is_stream = inspect.isasyncgenfunction(behaviour)
        call = _streaming(behaviour, self._writes) if is_stream else _awaited(behaviour)
        make, decode = getattr(grpc, f"{kind}_rpc_method_handler"), handler.request_deserializer
        return make(call, handing_on(decode) if kind.startswith("unary") else decode, handler.response_serializer)


def _awaited(behaviour: Any) -> Any:
    """For handlers that return one response, and those that write a stream of them through the context."""

    async def call(request: Any, context: Any) -> Any:
        try:
            return await behaviour(checked(request), context)
        except (aio.AbortError, asyncio.CancelledError):
            raise
        except Exception as error:
            await _abort(context, error)

    return call


def _streaming(behaviour: Any, writes: Writes) -> Any:
    async def call(request: Any, context: Any) -> None:
        try:
            # Closed here and now when the call ends early: what it holds is freed within one turn of the loop.
            async with aclosing(behaviour(checked(request), context)) as responses:
                async for response in responses:
                    try:
                        await writes.write(context, response)
                    except errors.LimitExceeded as error:
                        await responses.athrow(error)  # the handler's own account of the call tells why it ends
        except (aio.AbortError, asyncio.CancelledError):
            raise
        except Exception as error:
            await _abort(context, error)

    return call


def make_server(
    *,
    share_port: bool,
    interceptors: Sequence[aio.ServerInterceptor] = (),
    options: Sequence[tuple[str, int]] = (),
    read_timeout: float = math.inf,
) -> aio.Server:
    """A server with Tandem's options and more; of the same option the last counts. Only frontends share a port;
    elsewhere a second bind must fail. Clients that take no message of their stream for `read_timeout` seconds get no
    more."""
    merged = {**dict(SERVER_OPTIONS), "grpc.so_reuseport": int(share_port), **dict(options)}
    return aio.server(interceptors=(ErrorInterceptor(read_timeout), *interceptors), options=list(merged.items()))


def listen(server: aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None = None) -> int:
    """Has the server listen, in plain text without credentials; the port. Raises StartupError if it can't be had."""
    where = address(host, port)
    try:
        if credentials is None:
            return int(server.add_insecure_port(where))
        return int(server.add_secure_port(where, credentials))
    except RuntimeError:
        raise errors.StartupError(f"can't listen on {where}: is the port taken?") from None


def make_channel(target: str) -> aio.Channel:
    """A client channel with Tandem's options, in plain text. shared.dialer makes others."""
    return aio.insecure_channel(target, options=CHANNEL_OPTIONS)


async def until_serving(endpoint: str, service: str) -> None:
    """Waits until the server at `endpoint` reports the health service as SERVING."""
    async with aio.insecure_channel(
        endpoint, options=[("grpc.max_reconnect_backoff_ms", 200), ("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            with suppress(aio.AioRpcError, errors.ProtocolError):
                answer = decoded(await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=1.0))
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            await asyncio.sleep(POLL_S)
