"""The core process's metrics: reads what the engine, the core and the worker links have counted. Counts nothing."""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from prometheus_client.core import Metric

from scheduler_svc.core import Counters, GroupLoad, Load
from scheduler_svc.engine import Engine
from scheduler_svc.worker_client import WorkerLink
from shared import __version__
from shared.metrics import counter, gauge, histogram, info

T = TypeVar("T")


def core_metrics(engine: Engine, model_name: str) -> Iterator[Metric]:
    """All of them, as of now."""
    load = engine.load()
    labels = {"version": __version__, "model_name": model_name}
    yield info("tandem_build_info", "Version of Tandem and name of the served model.", labels)
    yield gauge(
        "tandem_leading", "1 while this scheduler dials the workers; 0: it stands by.", float(engine.is_leading)
    )
    yield from _load(load, engine.block_size)
    yield from _counts(load.counters)
    links = list(engine.workers.links.values())
    yield from _groups(links, load)
    yield from _steps(links)


def _load(load: Load, block_size: int) -> Iterator[Metric]:
    blocks = sum(group.total_blocks for group in load.groups.values())
    held = blocks - sum(group.free_blocks for group in load.groups.values())
    running = sum(group.running for group in load.groups.values())
    yield gauge("tandem_num_requests_waiting", "Sequences that wait for admission.", load.queued)
    yield gauge("tandem_num_requests_running", "Sequences that hold K/V blocks.", running)
    usage = held / blocks if blocks else 0.0
    yield gauge("tandem_kv_cache_usage_perc", "K/V blocks that running sequences hold; 1 is all of them.", usage)
    sizes = {"block_size": str(block_size), "num_gpu_blocks": str(blocks)}
    yield info("tandem_cache_config_info", "Tokens of a K/V block, and blocks of all worker groups.", sizes)


def _counts(counts: Counters) -> Iterator[Metric]:
    yield counter("tandem_prefix_cache_queries", "Prompt tokens looked up at first admission.", counts.prefix_queries)
    yield counter("tandem_prefix_cache_hits", "Prompt tokens found in the prefix cache.", counts.prefix_hits)
    yield counter("tandem_scheduled_tokens", "Tokens that steps computed, again or not.", counts.scheduled_tokens)
    yield counter("tandem_sampled_tokens", "Sampled tokens that their sequences took.", counts.sampled_tokens)
    yield counter("tandem_wasted_rows", "Sampled tokens dropped: their sequence had ended or left.", counts.stale_rows)
    yield counter("tandem_num_preemptions", "Sequences put back to the queue for lack of blocks.", counts.preemptions)
    yield counter("tandem_replays", "Sequences computed again: their worker was lost or drained.", counts.requeued)
    yield counter("tandem_failed_rows", "Requests ended because their logits were not finite.", counts.failed_rows)
    yield counter("tandem_quarantined", "Requests ended because workers kept being lost with them.", counts.quarantined)


def _groups(links: list[WorkerLink], load: Load) -> Iterator[Metric]:
    by_worker = {link.endpoint: load.groups.get(link.group, GroupLoad()) for link in links}

    def of(read: Callable[[GroupLoad], float]) -> Mapping[str, float]:
        return {endpoint: read(group) for endpoint, group in by_worker.items()}

    connected = {link.endpoint: float(link.is_connected) for link in links}
    yield gauge("tandem_group_connected", "1 while the group's plan stream is open.", connected, "worker")
    refused = {link.endpoint: float(link.is_refused) for link in links}
    yield gauge("tandem_group_refused", "1 while the group answers and can't serve here.", refused, "worker")
    draining = of(lambda group: group.draining)
    yield gauge("tandem_group_draining", "1 while the group is about to leave.", draining, "worker")
    yield gauge("tandem_group_running", "Sequences running on the group.", of(lambda group: group.running), "worker")
    total = of(lambda group: group.total_blocks)
    yield gauge("tandem_group_kv_blocks", "K/V blocks of the group's pool.", total, "worker")
    free = of(lambda group: group.free_blocks)
    yield gauge("tandem_group_kv_blocks_free", "K/V blocks that no running sequence holds.", free, "worker")


def _steps(links: list[WorkerLink]) -> Iterator[Metric]:
    counts = {link.endpoint: link.counts for link in links}

    def of(name: str) -> dict[str, T]:
        return {endpoint: getattr(count, name) for endpoint, count in counts.items()}

    yield counter("tandem_group_losses", "Times that the group was lost.", of("losses"), "worker")
    yield counter("tandem_group_busy_seconds", "Time that steps took on the worker.", of("busy_s"), "worker")
    yield counter("tandem_group_working_seconds", "Time with a step planned and no result.", of("working_s"), "worker")
    yield histogram("tandem_group_step_time_seconds", "Time of a step on the worker.", of("step_time"), "worker")
    yield histogram("tandem_group_step_rows", "Rows of a step.", of("step_rows"), "worker")
    yield histogram("tandem_group_plan_size_bytes", "Bytes of a plan.", of("plan_size"), "worker")
    yield histogram("tandem_group_result_size_bytes", "Bytes of a result.", of("result_size"), "worker")
