"""What is counted of steps: against the plans themselves, and read from another mapping of the same memory."""

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import Metric

from shared.pb import worker_pb2
from shared.types import NO_TRIPLES, StepPlan, StepResult
from shared.wire import plan_to_pb, result_to_pb
from worker_svc.stats import create_stats, no_stats, open_stats

ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.booleans()), max_size=4)
"""(slot, tokens, whether they are known): an unknown one is alone."""


def message(rows: list[tuple[int, int, bool]]) -> worker_pb2.StepPlan:
    packed = np.array([(slot, count, count) if known else (slot, 1, 0) for slot, count, known in rows], dtype=np.int32)
    known = sum(count for _, count, known in rows if known)
    plan = StepPlan(1, 1, rows=packed if rows else NO_TRIPLES, token_ids=np.zeros(known, dtype=np.int32))
    return plan_to_pb(plan, 1)


def told(metrics: list[Metric]) -> dict[str, float]:
    return {sample.name: sample.value for metric in metrics for sample in metric.samples if "le" not in sample.labels}


@given(st.lists(st.tuples(ROWS, st.integers(0, 2_000_000)), max_size=6))
def test_steps_are_counted_as_their_plans_say(steps: list[tuple[list[tuple[int, int, bool]], int]]) -> None:
    stats = no_stats()
    sizes = [0, 0]
    for rows, step_time_us in steps:
        plan = message(rows)
        result = result_to_pb(StepResult(1, 1, step_time_us=step_time_us), 1)
        sizes[0] += len(plan.SerializeToString())
        sizes[1] += len(result.SerializeToString())
        stats.step(plan, result)
    now, computing = told(list(stats.metrics())), [(rows, us) for rows, us in steps if rows]
    assert now["tandem_worker_heartbeats_total"] == len(steps) - len(computing)
    assert now["tandem_worker_step_rows_sum"] == sum(len(rows) for rows, _ in computing)
    tokens = sum(count if known else 1 for rows, _ in computing for _, count, known in rows)
    assert now["tandem_worker_tokens_total"] == tokens
    assert np.isclose(now["tandem_worker_busy_seconds_total"], sum(us for _, us in computing) / 1e6)
    assert now["tandem_worker_step_time_seconds_count"] == len(computing)
    assert now["tandem_worker_plan_size_bytes_count"] == len(steps)
    assert [now["tandem_worker_plan_size_bytes_sum"], now["tandem_worker_result_size_bytes_sum"]] == sizes


def test_the_launcher_reads_what_rank_0_counts(tmp_path: Path) -> None:
    """Also when the file is gone: it is removed once all ranks are warm."""
    launchers = create_stats(tmp_path / "stats")
    ranks = open_stats(tmp_path / "stats")
    (tmp_path / "stats").unlink()
    ranks.opened()
    ranks.step(message([(0, 3, True)]), worker_pb2.StepResult())
    now = told(list(launchers.metrics()))
    assert (now["tandem_worker_epochs_total"], now["tandem_worker_tokens_total"]) == (1, 3)
