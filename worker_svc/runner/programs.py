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
from worker_svc.runner.buckets import mixed_buckets, mixed_rows, row_buckets, smallest
from worker_svc.runner.step_kernels import StepKernels

_log = structlog.get_logger(__name__)

_Key: TypeAlias = tuple[str, int, int]  # a program, its rows or tokens, and narrow or its rows


class Programs:
    """A decode step is one program. A mixed step is two, since its sampling depends on the rows alone: what gives
    logits, and what samples from them."""

    def __init__(self, kernels: StepKernels, limits: Limits, *, mixed: bool) -> None:
        """`mixed`: whether steps of rows of any length can be captured."""
        self._kernels = kernels
        self._graphs: dict[_Key, torch.cuda.CUDAGraph] = {}
        self.launches = 0
        """How often a graph was launched."""
        self._rows = row_buckets(limits.max_num_seqs)
        self._mixed_rows = mixed_rows(limits.max_num_seqs)
        self._mixed = mixed_buckets(limits.max_num_batched_tokens, limits.max_num_seqs) if mixed else []

    @property
    def num_graphs(self) -> int:
        """How many capture() makes."""
        return len(self._keys())

    @property
    def captured(self) -> int:
        """How many there are: none before capture()."""
        return len(self._graphs)

    @torch.inference_mode()
    def capture(self, *, report: bool) -> None:
        """Captures all graphs, the largest first: the others fit into its memory."""
        keys = self._keys()
        started = time.monotonic()
        pool = torch.cuda.graph_pool_handle()
        for key in _with_progress("Capturing CUDA graphs", keys, report):
            self._graphs[key] = _captured(self._call(key), pool)
        if report:
            _log.info("captured CUDA graphs", graphs=len(keys), seconds=round(time.monotonic() - started, 1))

    @torch.inference_mode()
    def run_all(self, *, report: bool) -> None:
        """In place of capture(): what every step launches is compiled."""
        for key in _with_progress("Compiling kernels", self._keys(), report):
            self._call(key)()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs the largest steps: compiles what they need, and takes the memory that they take."""
        largest: dict[str, _Key] = {}
        for key in self._keys():
            largest.setdefault(key[0], key)
        for key in largest.values():
            self._call(key)()

    def decode_size(self, rows: int) -> int:
        """The bucket of decode rows."""
        return smallest(self._rows, rows)

    def decode(self, rows: int, *, narrow: bool) -> None:
        """A whole step of a bucket that decode_size gave. `narrow`: see StepKernels.sample."""
        self._run(("decode", rows, narrow))

    def mixed_size(self, tokens: int, rows: int) -> tuple[int, int]:
        """The bucket of a mixed step; its tokens are not padded where such steps are not captured."""
        rows = smallest(self._mixed_rows, rows)
        return next((bucket for bucket in self._mixed if bucket[0] >= tokens and bucket[1] >= rows), (tokens, rows))

    def mixed(self, bucket: tuple[int, int]) -> None:
        """Logits of a bucket that mixed_size gave."""
        self._run(("mixed", *bucket))

    def sample(self, rows: int, *, narrow: bool) -> None:
        """Tokens from the logits of the rows of a bucket that mixed_size gave. `narrow`: see StepKernels.sample."""
        self._run(("sample", rows, narrow))

    def _keys(self) -> list[_Key]:
        mixed: list[_Key] = [("mixed", *bucket) for bucket in reversed(self._mixed)]
        decode = [("decode", rows, narrow) for rows in reversed(self._rows) for narrow in (True, False)]
        sample = [("sample", rows, narrow) for rows in reversed(self._mixed_rows) for narrow in (True, False)]
        return [*mixed, *decode, *sample]

    def _run(self, key: _Key) -> None:
        graph = self._graphs.get(key)
        if graph is None:
            self._call(key)()
        else:
            self.launches += 1
            graph.replay()

    def _call(self, key: _Key) -> Callable[[], object]:
        part, size, other = key
        if part == "decode":
            return partial(self._decode, size, bool(other))
        if part == "mixed":
            return partial(self._kernels.mixed, size, other)
        return partial(self._kernels.sample, size, bool(other))

    def _decode(self, rows: int, narrow: bool) -> None:
        self._kernels.decode(rows)
        self._kernels.sample(rows, narrow)


def _captured(step: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:
    """Runs it once before, for what the first call of a kernel does besides."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        step()
    return graph


def _with_progress(what: str, keys: list[_Key], report: bool) -> Iterable[_Key]:
    if not report or not sys.stderr.isatty():
        return keys
    return track(keys, what, console=Console(stderr=True), transient=True)
