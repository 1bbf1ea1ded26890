"""What an OpenTelemetry collector is to its clients: takes spans by OTLP over gRPC and keeps them."""

import contextlib
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Its spans, in the order of their arrival."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self.spans: list[Span] = []

    def Export(self, request: Any, context: Any) -> Any:
        self.spans += [span for part in request.resource_spans for scope in part.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    collector = Collector(server.add_insecure_port("127.0.0.1:0"))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    server.start()
    try:
        yield collector
    finally:
        server.stop(0)
