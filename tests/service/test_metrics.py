"""Metrics of a real run against what its clients saw: nothing falls, vanishes, doubles or grows without bound.

The oracle counts what the streams gave.
"""

import asyncio
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from grpc import aio
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from scheduler_svc.snapshots import INTERVAL_S
from shared.pb import generation_pb2 as pb
from shared.pb import generation_pb2_grpc
from tests.patience import PATIENCE_S
from tests.service.collector import Collector, collecting
from tests.service.scrape import Scrape, scrape, scrape_until
from tests.service.tandem_process import Output, Tandem, follow, free_pair, generate_all, running, until_idle

WITH_TLS_ALONE = {"tandem_tls_certificate_expiry_timestamp_seconds"}
"""See tests/service/test_security.py."""
DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


class Metered:
    """A service and its endpoints."""

    def __init__(self, service: Tandem, port: int, collector: Collector) -> None:
        self.service = service
        self.collector = collector
        self.scheduler, self.worker = port, port + 1

    def idle(self) -> Scrape:
        """The scheduler's metrics once nothing runs and every process has told its counts."""
        asyncio.run(until_idle(self.service.endpoint))
        time.sleep(2.5 * INTERVAL_S)
        return scrape(self.scheduler)


@pytest.fixture(scope="module")
def metered(tmp_path_factory: pytest.TempPathFactory):
    port = free_pair()
    arguments = ["--dtype", "float64", "--frontends", "2", "--kv-cache-memory", "64", "--max-num-seqs", "32"]
    log = tmp_path_factory.mktemp("metrics") / "log"
    with collecting() as collector:
        arguments += ["--metrics-port", str(port), "--otlp-endpoint", collector.endpoint]
        with running(log, *arguments, "--step-timeout", "2", OTEL_BSP_SCHEDULE_DELAY="200") as service:
            yield Metered(service, port, collector)


def requests(count: int, max_tokens: int = 20) -> list[pb.GenerateRequest]:
    made = []
    for number in range(count):
        request = pb.GenerateRequest(text="It is a truth universally acknowledged, that " * (4 + number % 3))
        request.sampling.seed = number
        request.stopping.max_tokens = max_tokens
        request.stopping.ignore_eos = True
        made.append(request)
    return made


def documented() -> dict[str, tuple[str, frozenset[str], str]]:
    """Name to type, labels and meaning, from the tables."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", DOCS.read_text(), re.MULTILINE)
    return {name: (kind, frozenset(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, text in rows}


def test_the_documented_metrics_are_those_that_there_are(metered: Metered) -> None:
    asyncio.run(generate_all(metered.service.endpoint, requests(2)))
    both = [metered.idle(), scrape(metered.worker)]
    told = {name: (now.kinds[name], now.labels[name], now.texts[name]) for now in both for name in now.kinds}
    assert told == {name: row for name, row in documented().items() if name not in WITH_TLS_ALONE}


def test_the_inference_extension_finds_one_series_of_each_of_its_gauges(metered: Metered) -> None:
    """Of several with labels its endpoint picker would take any one."""
    now = metered.idle()
    for name in ("tandem_num_requests_waiting", "tandem_num_requests_running", "tandem_kv_cache_usage_perc"):
        assert now.kinds[name] == "gauge" and now.labels[name] == frozenset()
        assert now.value(name) == 0, "nothing runs"
    assert now.labels["tandem_cache_config_info"] == {"block_size", "num_gpu_blocks"}


def test_counts_are_what_clients_saw_and_no_request_adds_a_series(metered: Metered) -> None:
    before = metered.idle()
    ends = asyncio.run(endings(metered.service.endpoint))
    after = metered.idle()

    def grew(name: str, **labels: str) -> float:
        return after.value(name, **labels) - before.value(name, **labels)

    assert grew("tandem_requests_total") == ends["requests"]
    assert grew("tandem_requests_total", finished_reason="length") == 12
    assert grew("tandem_requests_total", finished_reason="invalid_argument") == 5
    assert grew("tandem_requests_total", finished_reason="cancelled") == 3
    assert grew("tandem_prompt_tokens_total") == ends["prompt_tokens"]
    assert grew("tandem_generation_tokens_total") >= ends["tokens"], "a client that left may not have read all"
    assert grew("tandem_e2e_request_latency_seconds_count") == ends["requests"]
    assert grew("tandem_time_to_first_token_seconds_count") == 15
    assert grew("tandem_request_queue_time_seconds_count") == 15
    assert 0 < grew("tandem_prefix_cache_hits_total") < grew("tandem_prefix_cache_queries_total")
    assert grew("tandem_group_busy_seconds_total") <= grew("tandem_group_working_seconds_total")
    assert set(after.samples) == set(before.samples)


async def endings(endpoint: str) -> dict[str, int]:
    """Requests that end in several ways, with ids, salts and priorities of their own; what was seen of them."""
    seen = {"requests": 0, "tokens": 0, "prompt_tokens": 0}
    async with aio.insecure_channel(endpoint) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for number, request in enumerate(requests(20, max_tokens=30)):
            request.request_id, request.cache_salt, request.priority = f"id-{number}", str(number % 4), number
            if number % 4 == 3:
                request.sampling.top_p = 2.0
            call = stub.Generate(request)
            try:
                async for response in call:
                    seen["tokens"] += len(response.token_ids)
                    if response.HasField("finish"):
                        seen["prompt_tokens"] += response.usage.prompt_tokens
                    if number % 6 == 0 and number and response.token_ids:
                        call.cancel()
            except (aio.AioRpcError, asyncio.CancelledError):
                pass
            seen["requests"] += 1
            if number % 6 == 0 and number:
                tokens = await stub.Tokenize(pb.TokenizeRequest(text=request.text))
                seen["prompt_tokens"] += len(tokens.token_ids)
    return seen


def test_a_lost_worker_is_counted_and_no_stream_changes(metered: Metered) -> None:
    wanted = requests(6, max_tokens=80)
    expected = asyncio.run(generate_all(metered.service.endpoint, wanted))
    before = metered.idle()
    outputs = asyncio.run(while_running(metered.service, wanted, "launcher"))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    after = metered.idle()
    assert after.value("tandem_group_losses_total") - before.value("tandem_group_losses_total") == 1
    assert after.value("tandem_replays_total") - before.value("tandem_replays_total") == 6
    assert after.value("tandem_num_requests_running") == after.value("tandem_kv_cache_usage_perc") == 0
    lines = [line for line in metered.service.log.read_text().splitlines() if '"event": "request"' in line]
    assert sum('"replays": 1' in line for line in lines[-6:]) == 6
    check_traces(metered.collector.spans)


def check_traces(spans: list[Span]) -> None:
    """Six requests lost their worker once: their parts follow each other, and the replay is part of the decoding."""
    replays = [span for span in spans if span.name == "replay"]
    assert [span.attributes[0].value.string_value for span in replays] == ["worker lost"] * 6
    for replay in replays:
        own = {span.name: span for span in spans if span.trace_id == replay.trace_id}
        assert set(own) == {"generate", "queue", "prefill", "decode", "replay"}
        queue, prefill, decode, whole = own["queue"], own["prefill"], own["decode"], own["generate"]
        assert queue.end_time_unix_nano == prefill.start_time_unix_nano
        assert prefill.end_time_unix_nano == decode.start_time_unix_nano
        for inner, outer in ((replay, decode), (queue, whole), (decode, whole)):
            assert outer.start_time_unix_nano <= inner.start_time_unix_nano
            assert inner.end_time_unix_nano <= outer.end_time_unix_nano


@pytest.mark.parametrize("role", ["core", "frontend"])
def test_counts_outlive_their_process(metered: Metered, role: str) -> None:
    """And are not counted twice when its successor tells its own."""
    asyncio.run(generate_all(metered.service.endpoint, requests(4)))
    before = metered.idle()
    starts = before.value("tandem_process_starts_total", process=role)
    metered.service.processes(role)[0].kill()
    counters = [name for name, kind in before.kinds.items() if kind == "counter" and "cpu_seconds" not in name]
    again = scrape_until(
        metered.scheduler, lambda now: now.value("tandem_process_starts_total", process=role) == starts + 1
    )
    for name in counters:
        if "starts" not in name:
            assert again.value(name) == before.value(name), name
    assert again.value("tandem_time_to_first_token_seconds_bucket", le="+Inf") == again.value(
        "tandem_time_to_first_token_seconds_count"
    )
    asyncio.run(serves_again(metered.service.endpoint))
    after = metered.idle()
    assert after.value("tandem_sampled_tokens_total") - before.value("tandem_sampled_tokens_total") == 80
    assert all(value >= 0 for value in after.samples.values())


async def serves_again(endpoint: str) -> None:
    while True:
        try:
            await generate_all(endpoint, requests(4))
            return
        except aio.AioRpcError:
            await asyncio.sleep(0.1)


async def while_running(service: Tandem, wanted: list[pb.GenerateRequest], role: str) -> list[Output]:
    """The outputs of `wanted`; a process is killed once each stream has begun."""
    outputs = [Output() for _ in wanted]
    async with aio.insecure_channel(service.endpoint) as channel:
        streams = asyncio.gather(*(follow(channel, *pair) for pair in zip(wanted, outputs, strict=True)))
        while not all(len(output.token_ids) > 5 for output in outputs):
            await asyncio.sleep(0.01)
        service.processes(role)[0].kill()
        await asyncio.wait_for(streams, PATIENCE_S)
    return outputs


def test_a_stopped_service_still_answers_scrapes(metered: Metered) -> None:
    """Core and rank are stopped: their parents answer, and do not wait for them."""
    stopped: list[psutil.Process] = [*metered.service.processes("core"), *metered.service.processes("rank")]
    for process in stopped:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        assert scrape(metered.scheduler).value("tandem_build_info") == 1
        now = scrape(metered.worker)
        assert now.value("tandem_worker_tokens_total") > 0
        assert now.value("tandem_worker_memory_bytes", kind="kv_cache") == 64 << 20
    finally:
        for process in stopped:
            os.kill(process.pid, signal.SIGCONT)
    asyncio.run(serves_again(metered.service.endpoint))
