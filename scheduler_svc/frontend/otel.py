"""Traces through OpenTelemetry: the one module that imports it, and only where an endpoint is given.

A request's spans are made when it ends, from times that were taken anyway: tracing costs nothing per token.
"""

import os
import threading
import time
from collections.abc import Iterable

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from scheduler_svc.frontend.timeline import Span
from scheduler_svc.frontend.tracing import Attributes, Metadata, trace_context
from shared import __version__

CLOSING_S = 2.0
"""For what is not sent yet when the process ends: a collector that is away must not hold it up."""


def otlp_processor(endpoint: str) -> SpanProcessor:
    """Sends spans in batches, from a thread of its own; what a slow collector leaves over is dropped."""
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://")))


class OtelTracing:
    """See Tracing. What to sample is OTEL_TRACES_SAMPLER's matter, by default what the caller samples, and all else."""

    def __init__(self, processor: SpanProcessor, model_name: str) -> None:
        service = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "tandem"), "service.version": __version__}
        self._provider = TracerProvider(resource=Resource.create(service), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("tandem", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    def begin(self, metadata: Metadata) -> "OtelTrace":
        """See Tracing."""
        parent = self._propagator.extract(trace_context(metadata))
        names = {"gen_ai.operation.name": "generate", "gen_ai.request.model": self._model_name}
        return OtelTrace(self._tracer, self._tracer.start_span("generate", parent, SpanKind.SERVER, names))

    def close(self) -> None:
        """See Tracing."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSING_S)


class OtelTrace:
    """See Trace."""

    def __init__(self, tracer: Tracer, root: OtelSpan) -> None:
        self.trace_id = format_trace_id(root.get_span_context().trace_id)
        self._tracer = tracer
        self._root = root

    def end(self, spans: Iterable[Span], attributes: Attributes, error: str | None) -> None:
        """See Trace."""
        parent = set_span_in_context(self._root)
        clock = time.time_ns() - time.monotonic_ns()
        for span in spans:
            cause = {"tandem.replay.cause": span.cause} if span.cause else None
            child = self._tracer.start_span(span.name, parent, attributes=cause, start_time=_ns(span.began, clock))
            child.end(_ns(span.ended, clock))
        self._root.set_attributes(dict(attributes))
        if error is not None:
            self._root.set_status(Status(StatusCode.ERROR, error))
        self._root.end()


def _ns(seconds: float, clock: int) -> int:
    """The monotonic clock's time as nanoseconds since 1970."""
    return round(seconds * 1e9) + clock
