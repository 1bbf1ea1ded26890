"""What a runner tells of its device, put where it is read. Called now and then, never by a step."""

import os
import resource

import torch

from worker_svc.runner.runner import Runner
from worker_svc.stats import Cell, StepStats


def count_runner(runner: Runner, stats: StepStats) -> None:
    """As of now."""
    cells = stats.cells
    cells[Cell.PADDING] = runner.padding
    cells[Cell.GRAPHS] = runner.num_graphs
    cells[Cell.GRAPH_LAUNCHES] = runner.graph_launches
    cells[Cell.KV_BYTES] = runner.cache.num_bytes
    cells[Cell.RESERVED_BYTES], cells[Cell.DEVICE_BYTES] = _memory(runner.cache.device)


def _memory(device: torch.device) -> tuple[int, int]:
    """What torch has taken of the device's memory, and all of it. On a CPU: this process's most, and the host's."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device), torch.cuda.get_device_properties(device).total_memory
    pages = os.sysconf("SC_PHYS_PAGES")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, pages * resource.getpagesize()
