"""Traces as the frontend knows them: a request's trace id and its spans. Knows no tracing library: `otel` does."""

import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Protocol, TypeAlias

from scheduler_svc.frontend.timeline import Span
from shared.errors import StartupError

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]] | None
"""Of a gRPC call."""
Attributes: TypeAlias = Mapping[str, str | int | float]

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
"""https://www.w3.org/TR/trace-context/#traceparent-header"""


class Trace(Protocol):
    """One request's part of a trace."""

    trace_id: str
    """32 hexadecimal digits; empty where nobody traces it."""

    def end(self, spans: Iterable[Span], attributes: Attributes, error: str | None) -> None:
        """The request is over: what it did, and the kind of error that ended it."""


class Tracing(Protocol):
    """Where traces go."""

    def begin(self, metadata: Metadata) -> Trace:
        """A request begins; its caller's trace context is among the metadata, if it has one."""

    def close(self) -> None:
        """Sends what is not sent yet, in bounded time. Blocks."""


class _CallersTrace:
    """Only the caller traces: the id is for the log."""

    def __init__(self, trace_id: str) -> None:
        self.trace_id = trace_id

    def end(self, spans: Iterable[Span], attributes: Attributes, error: str | None) -> None:
        """See Trace: nothing."""


class NoTracing:
    """Traces go nowhere. See Tracing."""

    def begin(self, metadata: Metadata) -> Trace:
        """See Tracing."""
        found = _TRACEPARENT.fullmatch(trace_context(metadata).get("traceparent", ""))
        return _CallersTrace(found[1] if found else "")

    def close(self) -> None:
        """See Tracing: nothing."""


def trace_context(metadata: Metadata) -> dict[str, str]:
    """The W3C trace context's headers."""
    names = ("traceparent", "tracestate")
    return {key: value for key, value in metadata or () if key in names and isinstance(value, str)}


def require_tracing() -> None:
    """Raises StartupError where OpenTelemetry is not installed."""
    try:
        found = find_spec("opentelemetry.exporter.otlp.proto.grpc") and find_spec("opentelemetry.sdk")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise StartupError("--otlp-endpoint: OpenTelemetry is not installed: pip install 'tandem-serve[otel]'")


def make_tracing(endpoint: str | None, model_name: str) -> Tracing:
    """Traces to `endpoint`, a URL, by OTLP over gRPC. Raises StartupError where that is not installed."""
    if endpoint is None:
        return NoTracing()
    require_tracing()
    from scheduler_svc.frontend.otel import OtelTracing, otlp_processor

    return OtelTracing(otlp_processor(endpoint), model_name)
