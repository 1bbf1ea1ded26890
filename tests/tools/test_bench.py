"""What `tandem bench` makes of what its clients saw."""

from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest

from shared.errors import RequestFailed, StartupError
from tandem.bench import measure as measuring
from tandem.bench.command import run
from tandem.bench.config import BenchConfig
from tandem.bench.measure import Goals, measure
from tandem.bench.work import poisson_arrivals, random_items
from tests.client.conftest import Server
from tests.frontend.fake_core import failed, ids, length

Stream: TypeAlias = tuple[float, float, list[tuple[float, int]], int]
"""(arrival, late, times of its messages with their tokens, prompt tokens)"""
STREAMS: list[Stream] = [(100.0, 0.0, [(100.1, 1), (100.2, 2), (100.4, 1)], 7), (100.5, 0.001, [(101.0, 1)], 9)]


def seen(streams: list[Stream] = STREAMS) -> dict[str, object]:
    """As a client process writes it."""
    messages = [message for stream in streams for message in stream[2]]
    return {
        "arrival": np.array([stream[0] for stream in streams]),
        "late": np.array([stream[1] for stream in streams]),
        "first": np.array([stream[2][0][0] for stream in streams]),
        "last": np.array([stream[2][-1][0] for stream in streams]),
        "tokens": np.array([sum(count for _, count in stream[2]) for stream in streams]),
        "later": np.array([sum(count for _, count in stream[2][1:]) for stream in streams]),
        "prompts": np.array([stream[3] for stream in streams]),
        "gaps": np.array([0.1, 0.2]),
        "times": np.array([time for time, _ in messages]),
        "counts": np.array([count for _, count in messages]),
        "errors": np.array(["QueueFull: full"]),
    }


def test_a_point_is_what_the_clients_saw() -> None:
    measured = measuring._measured("two", 100.0, Goals(ttft_ms=200, tpot_ms=120), [seen()])
    point = measured.point
    assert (point.failed, point.tokens_per_second, point.prompt_tokens_per_second) == (1, 5, 16)
    assert point.ttft_p50_ms == pytest.approx(300) and point.ttft_p99_ms == pytest.approx(496)
    assert point.gap_p50_ms == pytest.approx(150) and point.gap_p99_ms == pytest.approx(199)
    assert point.tpot_ms == pytest.approx(100), "the second has one token, which tells nothing"
    assert point.decode_ms == 0.0
    assert point.goodput == 1.0, "the second's first token came too late"
    assert measured.errors == ("QueueFull: full",)


@pytest.mark.parametrize("held_up", [[(100.5, 5)] + [(100.6 + i / 10, 1) for i in range(5)], [(100.4, 10)]])
def test_a_first_message_that_was_held_up_does_not_make_decoding_faster(held_up: list[tuple[float, int]]) -> None:
    """All take 100 ms a token; what the first tokens of one took was not seen, or what all of them did."""
    streams: list[Stream] = [
        (100.0, 0.0, [(100.1 + i / 10, 1) for i in range(10)], 7),
        (100.0, 0.0, held_up, 7),
    ]
    point = measuring._measured("two", 100.0, Goals(ttft_ms=200, tpot_ms=120), [seen(streams)]).point
    assert point.tpot_ms == pytest.approx(100)
    assert point.decode_ms == pytest.approx(100 if len(held_up) > 1 else 0.0)


def test_the_same_seed_makes_the_same_work_within_its_bounds() -> None:
    items = random_items(50, 20, 40, seed=3, range_ratio=0.5)
    assert items == random_items(50, 20, 40, seed=3, range_ratio=0.5) != random_items(50, 20, 40, seed=4)
    prompts = [len(item.prompt) for item in items]
    assert 10 <= min(prompts) < max(prompts) <= 30
    assert all(20 <= item.output_length <= 60 for item in items)
    arrivals = [item.arrival for item in poisson_arrivals(items, rate=10.0)]
    assert arrivals == sorted(arrivals) and 2.0 < arrivals[-1] < 10.0


@pytest.mark.parametrize(("concurrency", "clients"), [(5, 2), (2, 4), (None, 3)])
def test_shares_of_the_clients_add_up(concurrency: int | None, clients: int) -> None:
    shares = [measuring._share(concurrency, clients, number) for number in range(clients)]
    assert concurrency is None or sum(shares) == concurrency


def test_real_clients_report_streams_failures_and_progress(server: Server) -> None:
    answers = iter([([7, 8, 9], length()), ([7], failed(13, "NaN")), ([7, 8, 9], length())])
    server.answer = lambda submit: next(answers)
    ended: list[int] = []
    items = random_items(3, 5, 3)
    measured = measure(server.endpoint, "three", items, 2, Goals(1e9, 1e9), concurrency=3, progress=ended.append)
    assert sum(ended) == 3 and measured.ttft_ms.size == 2 and measured.counts.sum() == 3 + 3 + 1
    assert measured.point.failed == 1 and measured.errors == ("RequestFailed: NaN",)
    assert [len(ids(submit.prompt)) for submit in server.core.submits] == [5, 5, 5]


def test_a_run_in_which_all_fail_is_an_error(server: Server) -> None:
    server.answer = lambda submit: ((), failed(13, "NaN"))
    with pytest.raises(RequestFailed, match="every request failed, the first with RequestFailed: NaN"):
        measure(server.endpoint, "all", random_items(2, 5, 3), 1, Goals(1, 1))


def test_lengths_that_do_not_fit_are_refused_before_anything_runs(server: Server) -> None:
    config = BenchConfig(input_len=100, output_len=50, range_ratio=0.5)
    with pytest.raises(StartupError, match=r"225 tokens together; .* at most 200"):
        run(server.endpoint, config, [1.0], None, None)
    assert not server.core.submits


@pytest.mark.parametrize(
    "wrong", [{"num_prompts": 0}, {"range_ratio": 1.5}, {"max_concurrency": 0}, {"ttft_goal": -1.0}]
)
def test_settings_have_bounds(wrong: dict[str, float]) -> None:
    with pytest.raises(StartupError, match=next(iter(wrong)).replace("_", "-")):
        BenchConfig(**wrong)  # type: ignore[arg-type]


def test_plots_are_pngs_in_which_a_point_has_one_color(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib import pyplot

    from tandem.bench.report import draw

    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    without_gaps = measuring._measured("prompts", 100.0, Goals(1, 1), [{**seen(), "gaps": np.array([])}])
    measured = measuring._measured("two", 100.0, Goals(1, 1), [seen()])
    draw("title", [without_gaps, measured], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    colors = {line.get_color() for axis in pyplot.gcf().axes for line in axis.lines if line.get_label() == "two"}
    pyplot.clf()
    assert colors == {"C1"}


def test_a_client_that_cannot_start_ends_the_run(server: Server) -> None:
    with pytest.raises(RequestFailed, match="a client process failed"):
        measure("no such endpoint:1", "none", random_items(2, 5, 3), 2, Goals(1, 1))
