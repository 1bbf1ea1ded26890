"""What is told of a request when it ends: its line in the log, its counts, its spans. The core is a script."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
import structlog
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.frontend import otel, tracing
from scheduler_svc.frontend.otel import OtelTracing
from shared.errors import StartupError
from shared.pb import core_pb2
from shared.pb import generation_pb2 as pb
from tests.frontend.fake_core import failed, length, until
from tests.frontend.harness import Served, collect, run, serving
from tests.patience import PATIENCE_S
from tests.service.collector import collecting

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = (("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01"),)
PAUSE_S = 0.02
SECRET = "the prompt nobody may read"


def request(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=SECRET, **fields)  # type: ignore[arg-type]


def lines(logs: list[structlog.typing.EventDict]) -> list[structlog.typing.EventDict]:
    return [entry for entry in logs if entry["event"] == "request"]


async def disturbed(served: Served, metadata: tuple[tuple[str, str], ...] = ()) -> None:
    """One request that is preempted once, loses its worker once, and ends by length after three tokens."""
    call = asyncio.create_task(collect(served.stub.Generate(request(request_id="r"), metadata=metadata)))
    (submit,) = await served.core.submitted()
    await asyncio.sleep(PAUSE_S)
    served.core.give(submit, [70], cached_tokens=2)
    for token, cause in ((71, core_pb2.REQUEUE_CAUSE_PREEMPTED), (72, core_pb2.REQUEUE_CAUSE_WORKER_LOST)):
        await asyncio.sleep(PAUSE_S)
        served.core.send_batch(core_pb2.TokenBatch(requeued=[core_pb2.Requeued(handle=submit.handle, cause=cause)]))
        await asyncio.sleep(PAUSE_S)
        served.core.give(submit, [token])
    served.core.give(submit, [], length())
    await call


def test_one_line_tells_all_but_the_text(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            with structlog.testing.capture_logs() as logs:
                await disturbed(served, TRACEPARENT)
                await served.idle()
        (line,) = lines(logs)
        told = {"request_id", "outcome", "trace_id", "prompt_tokens", "cached_tokens", "completion_tokens"}
        told |= {"preemptions", "replays", "queue_ms", "first_token_ms", "total_ms"}
        assert told | {"event", "log_level"} == set(line)
        assert (line["outcome"], line["preemptions"], line["replays"]) == ("length", 1, 1)
        assert (line["completion_tokens"], line["cached_tokens"], line["trace_id"]) == (3, 2, TRACE_ID)
        least_ms = 1e3 * PAUSE_S
        assert least_ms <= line["queue_ms"] <= line["first_token_ms"] <= line["total_ms"] - 4 * least_ms
        assert SECRET not in json.dumps(logs)

    run(scenario())


@pytest.mark.parametrize(
    "header", ["", "00", f"00-{'0' * 32}-{SPAN_ID}-01", f"ff-{TRACE_ID}-{SPAN_ID}-01", f"00-{TRACE_ID.upper()}-1-01"]
)
def test_a_trace_context_that_is_none_is_passed_over(header: str) -> None:
    assert tracing.NoTracing().begin((("traceparent", header),)).trace_id == ""


def test_endings_are_told_as_what_they_are(model: Path) -> None:
    """In the log and in the counts, and no ending makes a new label."""

    async def scenario() -> None:
        async with serving(model) as served:
            counts, labels = served.frontend.service.counts, set(served.frontend.service.counts.finished)
            with structlog.testing.capture_logs() as logs:
                await ends(served, failed(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], "full", 5))
                await ends(served, failed(grpc.StatusCode.CANCELLED.value[0], "by its id"))
                await ends(served, failed(77, "an unknown kind"))
                await ends(served, length())
                await fails(served.stub.Generate(request(n=1000)))
                await fails(served.stub.Generate(request(), timeout=0.5))
                call = served.stub.Generate(request())
                await served.core.submitted(6)
                call.cancel()
                await until(lambda: len(lines(logs)) == 7)
            outcomes = [line["outcome"] for line in lines(logs)]
            told = ["resource_exhausted", "aborted", "internal", "length", "invalid_argument", "deadline_exceeded"]
            assert outcomes == [*told, "cancelled"]
            assert {name for name, count in counts.finished.items() if count} == set(outcomes)
            assert set(counts.finished) == labels
            assert sum(counts.end_to_end.counts) == 7

    run(scenario())


def test_a_client_that_asks_again_while_nobody_serves_is_one_failure(model: Path) -> None:
    """And one that got something before nobody served again is another."""
    unavailable = failed(grpc.StatusCode.UNAVAILABLE.value[0], "no worker for 60 s")

    async def scenario() -> None:
        async with serving(model) as served:
            counts = served.frontend.service.counts
            with structlog.testing.capture_logs() as logs:
                for _ in range(3):
                    await ends(served, unavailable, (), request_id="patient")
                await ends(served, unavailable, (), request_id="another")
                await ends(served, unavailable, request_id="patient")
                await ends(served, length(), request_id="patient")
                await ends(served, unavailable, (), request_id="patient")
                await served.idle()
            told = [("patient", "unavailable"), ("another", "unavailable"), ("patient", "unavailable")]
            told += [("patient", "length"), ("patient", "unavailable")]
            assert [(line["request_id"], line["outcome"]) for line in lines(logs)] == told
            assert (counts.finished["unavailable"], counts.finished["length"]) == (4, 1)
            assert sum(counts.end_to_end.counts) == 5

    run(scenario())


async def ends(served: Served, how: core_pb2.Ended, tokens: Sequence[int] = (70,), **fields: object) -> None:
    count = len(served.core.submits)
    call = asyncio.create_task(fails(served.stub.Generate(request(**fields))))
    await until(lambda: len(served.core.submits) > count)
    served.core.give(served.core.submits[-1], tokens, how, cached_tokens=0)
    await call


async def fails(call: object) -> None:
    try:
        await collect(call)
    except grpc.aio.AioRpcError:
        return


def test_counts_are_what_clients_got(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model, lambda submit: ([70] * 5, length())) as served:
            got = [response for _ in range(4) for response in await collect(served.stub.Generate(request(n=2)))]
            await served.idle()
            counts = served.frontend.service.counts
            assert counts.generation_tokens == sum(len(response.token_ids) for response in got) == 40
            prompts = sum({response.request_id: 0 for response in got if response.request_id}.values(), 4)
            assert sum(counts.first_token.counts) == prompts == 4
            assert sum(counts.queue.counts) == sum(counts.generation_length.counts) == 8
            assert sum(served.frontend.link.gaps.counts) == 8 * 4, "between five tokens are four gaps"
            assert counts.prompt_tokens == 4 * len(served.core.submits[0].prompt) // 4

    run(scenario())


def by_name(spans: list[ReadableSpan]) -> dict[str, list[ReadableSpan]]:
    named: dict[str, list[ReadableSpan]] = {}
    for span in sorted(spans, key=lambda span: span.start_time or 0):
        named.setdefault(span.name, []).append(span)
    return named


def test_spans_of_a_disturbed_request(model: Path) -> None:
    """Children of the caller's span, one after the other, and a replay for each disturbance."""
    exporter = InMemorySpanExporter()

    async def scenario() -> None:
        async with serving(model, tracing=OtelTracing(SimpleSpanProcessor(exporter), "small")) as served:
            await disturbed(served, TRACEPARENT)

    run(scenario())
    spans = by_name(list(exporter.get_finished_spans()))
    assert {name: len(found) for name, found in spans.items()} == {
        "generate": 1,
        "queue": 1,
        "prefill": 1,
        "decode": 1,
        "replay": 2,
    }
    (root,) = spans["generate"]
    assert root.parent is not None and f"{root.parent.span_id:016x}" == SPAN_ID
    assert {f"{span.context.trace_id:032x}" for found in spans.values() for span in found} == {TRACE_ID}
    children = [span for name, found in spans.items() for span in found if name != "generate"]
    assert all(span.parent is not None and span.parent.span_id == root.context.span_id for span in children)
    queue, prefill, decode = (spans[name][0] for name in ("queue", "prefill", "decode"))
    assert (queue.end_time, prefill.end_time) == (prefill.start_time, decode.start_time)
    assert root.start_time <= queue.start_time and decode.end_time <= root.end_time
    assert [span.attributes["tandem.replay.cause"] for span in spans["replay"]] == ["preempted", "worker lost"]
    assert all(decode.start_time <= span.start_time < span.end_time <= decode.end_time for span in spans["replay"])
    assert root.attributes["gen_ai.usage.output_tokens"] == 3
    assert root.status.is_ok or root.status.is_unset
    assert SECRET not in "".join(span.to_json() for found in spans.values() for span in found)


def test_a_failed_request_without_a_caller_has_a_trace_of_its_own(model: Path) -> None:
    exporter = InMemorySpanExporter()

    async def scenario() -> None:
        async with serving(model, tracing=OtelTracing(SimpleSpanProcessor(exporter), "small")) as served:
            with structlog.testing.capture_logs() as logs:
                await fails(served.stub.Generate(request(n=1000)))
                await served.idle()
            (span,) = exporter.get_finished_spans()
            assert lines(logs)[0]["trace_id"] == f"{span.context.trace_id:032x}"
            assert span.parent is None
            assert (span.status.is_ok, span.status.description) == (False, "invalid_argument")

    run(scenario())


def test_traces_reach_a_collector_when_the_frontend_stops(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "CLOSING_S", PATIENCE_S)  # the collector is there, if slow

    async def scenario(endpoint: str) -> None:
        async with serving(model, otlp_endpoint=endpoint) as served:
            await disturbed(served)

    with collecting() as collector:
        run(scenario(collector.endpoint))
    names = sorted(span.name for span in collector.spans)
    assert names == ["decode", "generate", "prefill", "queue", "replay", "replay"]


def test_a_collector_that_is_away_holds_up_nobody(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model, otlp_endpoint="http://127.0.0.1:1") as served:
            await disturbed(served)

    run(scenario())


def test_tracing_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    with pytest.raises(StartupError, match=r"--otlp-endpoint.*tandem-serve\[otel\]"):
        tracing.make_tracing("http://127.0.0.1:4317", "model")


def test_an_endpoint_is_a_url() -> None:
    with pytest.raises(StartupError, match=r"--otlp-endpoint '127.0.0.1:4317': http://host:port"):
        SchedulerConfig(model=Path("x"), workers=("a:1",), otlp_endpoint="127.0.0.1:4317")
