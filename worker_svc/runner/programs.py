"""The step of every bucket, as CUDA graphs or, with --enforce-eager, as the calls that would be captured.

A graph replays in one launch what takes hundreds; its tensors lie in a pool that all graphs share, since no two run at
a time.
"""

import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import structlog
import torch
from rich.console import Console
from rich.progress import track

from worker_svc.runner.batch import Limits
from worker_svc.runner.buckets import mixed_buckets, row_buckets, smallest
from worker_svc.runner.step_kernels import StepKernels

_log = structlog.get_logger(__name__)

_Key: TypeAlias = tuple[int, ...]  # (rows,) of a decode step, (tokens, rows) of a mixed one


class Programs:
    """Runs a step of at least the size that is asked for."""

    def __init__(self, kernels: StepKernels, limits: Limits, *, mixed: bool) -> None:
        """`mixed`: whether steps of rows of any length can be captured."""
        self._kernels = kernels
        self._graphs: dict[_Key, torch.cuda.CUDAGraph] = {}
        self._rows = row_buckets(limits.max_num_seqs)
        self._mixed = mixed_buckets(limits.max_num_batched_tokens, limits.max_num_seqs) if mixed else []

    @torch.inference_mode()
    def capture(self, *, report: bool) -> None:
        """Captures all graphs, the largest first: the others fit into its memory."""
        keys = [*reversed(self._mixed), *((rows,) for rows in reversed(self._rows))]
        started = time.monotonic()
        pool = torch.cuda.graph_pool_handle()
        for key in _with_progress(keys, report):
            self._graphs[key] = _captured(self._call(key), pool)
        if report:
            _log.info("captured CUDA graphs", graphs=len(keys), seconds=round(time.monotonic() - started, 1))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs the largest steps: compiles what they need, and takes the memory that they take."""
        for key in [*self._mixed[-1:], (self._rows[-1],)]:
            self._call(key)()

    def decode(self, rows: int) -> None:
        """A step of `rows` decode rows or more."""
        self._run((smallest(self._rows, rows),))

    def mixed_size(self, tokens: int, rows: int) -> tuple[int, int]:
        """The bucket of a mixed step."""
        return next(bucket for bucket in self._mixed if bucket[0] >= tokens and bucket[1] >= rows)

    def mixed(self, bucket: tuple[int, int]) -> None:
        """A step of a bucket that mixed_size gave."""
        self._run(bucket)

    def _run(self, key: _Key) -> None:
        graph = self._graphs.get(key)
        if graph is None:
            self._call(key)()
        else:
            graph.replay()

    def _call(self, key: _Key) -> Callable[[], None]:
        if len(key) == 1:
            return partial(self._kernels.decode, key[0])
        return partial(self._kernels.mixed, key[0], key[1])


def _captured(step: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """Runs it once before, for what the first call of a kernel does besides."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        step()
    return graph


def _with_progress(keys: list[_Key], report: bool) -> Iterable[_Key]:
    if not report or not sys.stderr.isatty():
        return keys
    return track(keys, "Capturing CUDA graphs", console=Console(stderr=True), transient=True)
