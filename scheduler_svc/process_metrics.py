"""What is told of every process of a scheduler, summed over those of one kind."""

import resource
import time
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import Metric

from shared.metrics import counter, gauge


def process_metrics(process: str) -> Iterator[Metric]:
    """Of this one; `process` names its kind."""
    yield counter("tandem_process_starts", "Processes started.", {process: 1}, "process")
    yield counter("tandem_process_cpu_seconds", "Processor time.", {process: time.process_time()}, "process")
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    memory = pages * resource.getpagesize()
    yield gauge("tandem_process_resident_memory_bytes", "Resident memory.", {process: memory}, "process")
