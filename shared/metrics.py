"""Plain numbers as Prometheus reads them: metric families, and the HTTP endpoint. Knows no metric by name."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TypeAlias

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.errors import StartupError
from shared.histogram import Histogram
from shared.ports import address

Values: TypeAlias = float | Mapping[str, float]
"""One number, or one for each value of a label."""


def counter(name: str, text: str, values: Values, label: str = "") -> Metric:
    """Its sample is called `name`_total."""
    family = CounterMetricFamily(name, text, labels=_names(label))
    for labels, value in _series(values):
        family.add_metric(labels, value)
    return family


def gauge(name: str, text: str, values: Values, label: str = "") -> Metric:
    """A number that rises and falls."""
    family = GaugeMetricFamily(name, text, labels=_names(label))
    for labels, value in _series(values):
        family.add_metric(labels, value)
    return family


def info(name: str, text: str, labels: Mapping[str, str]) -> Metric:
    """A gauge that is always 1: what it tells is in its labels."""
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family


def histogram(name: str, text: str, values: Histogram | Mapping[str, Histogram], label: str = "") -> Metric:
    """Its samples are called `name`_bucket, _count and _sum."""
    family = HistogramMetricFamily(name, text, labels=_names(label))
    for key, value in values.items() if isinstance(values, Mapping) else [("", values)]:
        totals = accumulate(value.counts)
        bounds = [*map(repr, value.bounds), "+Inf"]
        family.add_metric([key] if label else [], list(zip(bounds, totals, strict=True)), value.sum)
    return family


def _names(label: str) -> list[str]:
    return [label] if label else []


def _series(values: Values) -> Iterator[tuple[list[str], float]]:
    if not isinstance(values, Mapping):
        yield [], values
        return
    for key, value in values.items():
        yield [key], value


class _Reader(Collector):
    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry would ask `collect`, before anything is there."""
        return ()


def serve_metrics(host: str, port: int, *reads: Callable[[], Iterable[Metric]]) -> None:
    """Answers GET /metrics in threads, which call `reads`, until the process ends. StartupError: no such port."""
    registry = CollectorRegistry()
    for read in reads:
        registry.register(_Reader(read))
    try:
        start_http_server(port, host, registry)
    except OSError as error:
        where = address(host, port)
        raise StartupError(f"can't listen on {where} ({error.strerror}): choose another --metrics-port") from None
