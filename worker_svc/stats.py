"""What is counted of a group's steps, in memory that rank 0 shares with its launcher: there it is read and told.

So telling costs the rank nothing: its interpreter is busy with steps. Knows no torch.
"""

from collections.abc import Iterator
from enum import IntEnum, auto
from mmap import mmap
from pathlib import Path

import numpy as np
from prometheus_client.core import Metric

from shared.histogram import ROWS, SHORT_S, SIZES, Histogram, width
from shared.metrics import counter, gauge, histogram
from shared.pb import worker_pb2

_ROW_BYTES = 12


class Cell(IntEnum):
    """Single numbers, by place."""

    EPOCHS = 0
    HEARTBEATS = auto()
    TOKENS = auto()
    PADDING = auto()
    FAILED_ROWS = auto()
    BUSY_S = auto()
    GRAPHS = auto()
    GRAPH_LAUNCHES = auto()
    KV_BYTES = auto()
    RESERVED_BYTES = auto()
    DEVICE_BYTES = auto()


_HISTOGRAMS = (SHORT_S, ROWS, SIZES, SIZES)
NUM_CELLS = len(Cell) + sum(map(width, _HISTOGRAMS))


def create_stats(path: Path) -> "StepStats":
    """A file of cells for a group that is about to start."""
    path.write_bytes(bytes(8 * NUM_CELLS))
    return open_stats(path)


def open_stats(path: Path) -> "StepStats":
    """The cells that the launcher created."""
    with path.open("r+b") as file:
        return StepStats(memoryview(mmap(file.fileno(), 8 * NUM_CELLS)).cast("d"))


class StepStats:
    """Totals since the start of the group."""

    def __init__(self, cells: "memoryview[float]") -> None:
        """`cells`: [NUM_CELLS] zeros, eight bytes each."""
        self.cells = cells
        made, start = [], len(Cell)
        for bounds in _HISTOGRAMS:
            made.append(Histogram(bounds, cells[start : start + width(bounds)]))
            start += width(bounds)
        self.step_time, self.rows, self.plan_size, self.result_size = made

    def step(self, plan: worker_pb2.StepPlan, result: worker_pb2.StepResult) -> None:
        """A plan was executed."""
        self.plan_size.observe(plan.ByteSize())
        self.result_size.observe(result.ByteSize())
        if not plan.rows:
            self.cells[Cell.HEARTBEATS] += 1
            return
        seconds = result.step_time_us / 1e6
        self.step_time.observe(seconds)
        self.rows.observe(len(plan.rows) // _ROW_BYTES)
        self.cells[Cell.BUSY_S] += seconds
        self.cells[Cell.TOKENS] += _num_tokens(plan)
        self.cells[Cell.FAILED_ROWS] += len(result.failed_rows) // 4

    def opened(self) -> None:
        """An epoch was opened."""
        self.cells[Cell.EPOCHS] += 1

    def metrics(self) -> Iterator[Metric]:
        """All of them, as of now."""
        cells = self.cells
        yield counter("tandem_worker_epochs", "Epochs opened.", cells[Cell.EPOCHS])
        yield counter("tandem_worker_heartbeats", "Plans without rows.", cells[Cell.HEARTBEATS])
        yield counter("tandem_worker_tokens", "Tokens computed.", cells[Cell.TOKENS])
        yield counter("tandem_worker_padding_tokens", "Tokens computed to fill a graph's bucket.", cells[Cell.PADDING])
        yield counter("tandem_worker_failed_rows", "Rows whose logits were not finite.", cells[Cell.FAILED_ROWS])
        yield counter("tandem_worker_busy_seconds", "Time that steps took.", cells[Cell.BUSY_S])
        yield counter("tandem_worker_graph_launches", "CUDA graphs launched.", cells[Cell.GRAPH_LAUNCHES])
        yield gauge("tandem_worker_graphs", "CUDA graphs captured.", cells[Cell.GRAPHS])
        memory = {
            "kv_cache": cells[Cell.KV_BYTES],
            "reserved": cells[Cell.RESERVED_BYTES],
            "device": cells[Cell.DEVICE_BYTES],
        }
        yield gauge("tandem_worker_memory_bytes", "Memory of rank 0, by kind.", memory, "kind")
        yield histogram("tandem_worker_step_time_seconds", "Time of a step.", self.step_time)
        yield histogram("tandem_worker_step_rows", "Rows of a step.", self.rows)
        yield histogram("tandem_worker_plan_size_bytes", "Bytes of a plan.", self.plan_size)
        yield histogram("tandem_worker_result_size_bytes", "Bytes of a result.", self.result_size)


def no_stats() -> StepStats:
    """Cells that nobody reads."""
    return StepStats(memoryview(bytearray(8 * NUM_CELLS)).cast("d"))


def _num_tokens(plan: worker_pb2.StepPlan) -> int:
    if not plan.token_ids:
        return len(plan.rows) // _ROW_BYTES
    return int(np.frombuffer(plan.rows, dtype="<i4")[1::3].sum())
