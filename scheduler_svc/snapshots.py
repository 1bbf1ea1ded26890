"""All metrics of one process at one moment, as they travel to the parent, and their sum over processes.

Knows no metric by name. A process sends its totals, not what is new: one that is lost or skipped costs nothing.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import structlog
from prometheus_client.core import Metric

from shared.framing import write_message

INTERVAL_S = 0.5
"""Between two snapshots: what a killed process counted since its last one is lost."""
CLOSING_S = 0.5

_KINDS = frozenset({"counter", "gauge", "histogram"})

_log = structlog.get_logger(__name__)

Labels: TypeAlias = tuple[tuple[str, str], ...]
"""Names and values, sorted."""


@dataclass(frozen=True, slots=True)
class Family:
    """One metric's samples."""

    kind: str
    """counter, gauge or histogram."""
    text: str
    samples: dict[tuple[str, Labels], float] = field(default_factory=dict)
    """By sample name and labels."""


Snapshot: TypeAlias = dict[str, Family]
"""Families by name."""


def take(metrics: Iterable[Metric]) -> Snapshot:
    """The metrics as values."""
    snapshot: Snapshot = {}
    for metric in metrics:
        family = snapshot.setdefault(metric.name, Family(metric.type, metric.documentation))
        for sample in metric.samples:
            family.samples[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return snapshot


def total(snapshots: Iterable[Snapshot]) -> Snapshot:
    """Sample by sample, the sum."""
    result: Snapshot = {}
    for snapshot in snapshots:
        for name, family in snapshot.items():
            samples = result.setdefault(name, Family(family.kind, family.text)).samples
            for key, value in family.samples.items():
                samples[key] = samples.get(key, 0.0) + value
    return result


def lasting(snapshot: Snapshot) -> Snapshot:
    """What outlives its process: counts. What a gauge told is no longer so."""
    return {name: family for name, family in snapshot.items() if family.kind != "gauge"}


def metrics(snapshot: Snapshot) -> Iterator[Metric]:
    """The inverse of `take`."""
    for name, family in snapshot.items():
        metric = Metric(name, family.text, family.kind)
        for (sample, labels), value in family.samples.items():
            metric.add_sample(sample, dict(labels), value)
        yield metric


def encode(snapshot: Snapshot) -> bytes:
    """JSON."""
    rows = [(name, family.kind, family.text, list(family.samples.items())) for name, family in snapshot.items()]
    return json.dumps(rows).encode()


def decode(payload: bytes) -> Snapshot:
    """The inverse of `encode`. Raises ValueError for anything else."""
    try:
        return {str(name): _family(str(kind), text, samples) for name, kind, text, samples in json.loads(payload)}
    except (TypeError, RecursionError) as error:
        raise ValueError(f"no snapshot: {error}") from None


def _family(kind: str, text: str, samples: Iterable[tuple[tuple[str, Iterable[tuple[str, str]]], float]]) -> Family:
    if kind not in _KINDS:
        raise ValueError(f"no kind of metric: {kind}")
    return Family(kind, str(text), {(str(name), _labels(labels)): float(value) for (name, labels), value in samples})


def _labels(labels: Iterable[tuple[str, str]]) -> Labels:
    return tuple((str(name), str(value)) for name, value in labels)


async def push(path: Path | None, read: Callable[[], Iterable[Metric]]) -> None:
    """Sends snapshots to the parent's socket until cancelled, and then a last one. No path: nobody wants them.

    What goes wrong here is logged and ends the metrics of this process, not the process.
    """
    if path is None:
        return
    try:
        _, writer = await asyncio.open_unix_connection(path)
        try:
            while True:
                _send(writer, read)
                await asyncio.sleep(INTERVAL_S)
        finally:
            _send(writer, read)
            writer.close()
            await asyncio.wait([asyncio.ensure_future(writer.wait_closed())], timeout=CLOSING_S)
    except Exception as error:
        _log.exception("no more metrics of this process", exc_info=error)


def _send(writer: asyncio.StreamWriter, read: Callable[[], Iterable[Metric]]) -> None:
    """Not while the parent has not taken the last one: a backlog would break the connection, and that is a death."""
    if not writer.transport.get_write_buffer_size():
        write_message(writer, encode(take(read())))
