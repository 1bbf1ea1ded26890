"""What `tandem top` shows of what a service says."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from tandem import Client, Load, ModelInfo, RequestFailed, RequestStats, Stats, WorkerLoad
from tandem.top import Watch
from tandem.top_view import Frame, percentile, view
from tests.client.conftest import Server
from tests.frontend.fake_core import failed, length

MODEL = ModelInfo("tiny", "", "Qwen3ForCausalLM", 512, 4096, (), "float32", "1")
LOAD = Load(3, 2, 64, (WorkerLoad("[::1]:5", True, 2, 80, 60), WorkerLoad("gpu:5", False, 0, 0, 0)))
STATS = Stats(LOAD, 3725.0, 1000, 5000, 4, 5, 12, ())


def text(frame: Frame, problem: str | None = None) -> str:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(view(frame, problem))
    return console.export_text()


def frame(**changes: Any) -> Frame:
    stats = replace(STATS, **changes)
    return Frame("host:1", MODEL, stats, 1234.4, (0.0, 617.2, 1234.4), 56.0, 7.25)


def request(number: int, **changes: Any) -> RequestStats:
    return replace(RequestStats(f"r{number}", "length", 10, 4, 11, 100.0, 300.0, 65.0), **changes)


def test_a_frame_tells_what_the_service_said() -> None:
    shown = text(frame(latest=(request(1), request(2, outcome="internal", total_ms=1500.0))))
    for words in (
        "tiny (Qwen3ForCausalLM, float32) at host:1", "1,234 tokens/s", "▁▅█", "56 tokens/s", "7.2 requests/s",
        "2 of 64", "3 queued", "4 preempted, 5 replayed", "[::1]:5", "25% of 80 blocks", "gpu:5", "away",
        "latest 1 finished", "100.0 ms", "20.0 ms", "300.0 ms", "1:05 ago", "internal", "1.50 s", "up 1:02:05",
    ):  # fmt: skip
        assert words in shown, words


def test_a_request_id_is_no_markup_and_a_problem_is_told() -> None:
    shown = text(frame(latest=(request(1, request_id="[red]x[/red]"),)), problem="[connection] refused")
    assert "[red]x[/red]" in shown and "[connection] refused" in shown


def test_a_request_without_tokens_has_no_first_one() -> None:
    refused = request(1, outcome="invalid_argument", completion_tokens=0, first_token_ms=7.5, total_ms=7.5)
    assert text(frame(latest=(refused,))).count("7.5 ms") == 1


def test_a_worker_that_leaves_or_is_away_is_told_with_its_reason() -> None:
    workers = (WorkerLoad("a:5", True, 2, 80, 60, draining=True), WorkerLoad("b:5", False, 0, 0, 0, problem="[red]"))
    shown = text(frame(load=replace(LOAD, workers=workers)))
    assert "draining" in shown and "connected" not in shown
    assert "away" in shown and "[red]" in shown


def test_a_worker_that_does_not_serve_takes_one_line() -> None:
    why = "UNAVAILABLE: failed to connect\nto all addresses; " + "ipv4:10.0.0.1:5: connection refused " * 20
    away, refused = (WorkerLoad(f"{name}:5", False, 0, 0, 0, problem=why, refused=name == "b") for name in "ab")
    shown = text(frame(load=replace(LOAD, workers=(LOAD.workers[0], away, refused))))
    lines = [line for line in shown.splitlines() if "failed to connect to all" in line]
    assert ["a:5" in line and "away" in line for line in lines] == [True, False]
    assert ["b:5" in line and "refused" in line for line in lines] == [False, True]
    assert shown.count("ipv4") == sum(line.count("ipv4") for line in lines), "the rest is cut off"


@pytest.mark.parametrize(
    ("queued", "workers", "told"),
    [
        (3, (WorkerLoad("a:5", False, 0, 0, 0, problem="it loads its model"),), "3 requests wait: none of these"),
        (1, (), "1 request waits: the names of --workers have no address"),
    ],
)
def test_before_the_first_worker_it_says_who_was_asked_and_who_waits(
    queued: int, workers: tuple[WorkerLoad, ...], told: str
) -> None:
    """And does not ask for the model, which nobody knows: the service would answer when the first worker comes."""
    watch = Watch(Nameless(*[replace(STATS, load=Load(queued, 0, 0, workers))] * 2), "host:1")  # type: ignore[arg-type]
    shown = text(watch.frame())
    assert f"no worker yet, {told}" in shown and "host:1" in shown and "tokens/s" not in shown
    assert all(worker.endpoint in shown and worker.problem in shown for worker in workers)


def test_nothing_has_ended_yet() -> None:
    assert "finished" not in text(frame()) and "latest 0 finished" in text(frame(latest=(request(1, outcome="x"),)))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20), st.sampled_from([50, 90, 99]))
def test_percentiles_are_numpys(values: list[int], share: int) -> None:
    assert percentile(values, share) == pytest.approx(float(np.percentile(values, share)))


class Scripted:
    """A client whose service answers from a list."""

    def __init__(self, *answers: Stats) -> None:
        self._answers = list(answers)
        self.model = MODEL

    def model_info(self) -> ModelInfo:
        return self.model

    def stats(self, max_requests: int) -> Stats:
        return self._answers.pop(0)


class Nameless(Scripted):
    """One before its first worker."""

    def model_info(self) -> ModelInfo:
        raise AssertionError("nobody knows the model yet")


def test_rates_are_differences_and_a_new_core_process_begins_at_zero() -> None:
    before = replace(STATS, uptime_s=100.0)
    after = replace(STATS, generation_tokens=STATS.generation_tokens + 50, requests=STATS.requests)
    restarted = replace(STATS, uptime_s=2.0, prompt_tokens=10, generation_tokens=20, requests=1)
    watch = Watch(Scripted(before, after, restarted), "host:1")  # type: ignore[arg-type]
    first, second = watch.frame(), watch.frame()
    assert first.generation_rate > 0 == first.prompt_rate == first.request_rate
    assert (second.prompt_rate, second.generation_rate, second.request_rate) == (5.0, 10.0, 0.5)


def test_the_header_follows_a_service_that_starts_again_with_another_dtype() -> None:
    service = Scripted(STATS, replace(STATS, uptime_s=1.0))
    watch = Watch(service, "host:1")  # type: ignore[arg-type]
    service.model = replace(MODEL, dtype="bfloat16")
    assert "bfloat16" in text(watch.frame())


def test_a_service_counts_its_requests_and_their_ends(server: Server) -> None:
    """The fake core keeps no statistics: what the frontend reports to it is what a real one keeps."""
    answers = iter([([7, 8], length()), ([7], failed(13, "NaN"))])
    server.answer = lambda submit: next(answers)
    with Client(server.endpoint) as client:
        client.complete("The", request_id="good")
        with pytest.raises(RequestFailed):
            client.complete("The", request_id="bad")
        while len(server.core.requests_ended) < 2:
            time.sleep(0.005)
    good, bad = server.core.requests_ended
    assert (good.request_id, good.outcome, good.completion_tokens) == ("good", "length", 2)
    assert (bad.request_id, bad.outcome) == ("bad", "internal")
    assert 0 < good.first_token_ms <= good.total_ms
