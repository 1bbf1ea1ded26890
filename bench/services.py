"""Services as processes, for benchmarks."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.work import SEQUENCES, context_of
from shared.ports import find_free
from shared.process import spawn, stop
from shared.rpc import until_serving


@contextmanager
def services(
    folder: Path,
    load_format: str,
    frontends: int,
    max_num_batched_tokens: int | None = None,
    tensor_parallel: int = 1,
    idle_step_us: float | None = None,
) -> Iterator[str]:
    """The endpoint of running services, as an operator starts them; stopped at the end.

    With `idle_step_us` the worker is bench.idle_worker instead, with steps of so many microseconds.
    """
    endpoint, worker_port = f"127.0.0.1:{(port := find_free('127.0.0.1'))}", find_free("127.0.0.1")
    model = ["--model", str(folder)]
    batched = ["--max-num-batched-tokens", str(max_num_batched_tokens)] if max_num_batched_tokens else []
    sizes = ["--max-num-seqs", str(SEQUENCES), *batched, "--tensor-parallel", str(tensor_parallel)]
    lengths = ["--max-model-len", str(context_of(folder)), "--load-format", load_format]
    workers = ["--workers", f"127.0.0.1:{worker_port}", "--frontends", str(frontends)]
    worker = ("tandem", ["worker", *model, "--port", str(worker_port), *lengths, *sizes])
    if idle_step_us is not None:
        worker = ("bench.idle_worker", [str(worker_port), str(folder), str(idle_step_us)])
    started = [spawn(*worker), spawn("tandem", ["scheduler", *model, "--port", str(port), *workers])]
    try:
        asyncio.run(asyncio.wait_for(until_serving(endpoint, "tandem.Active"), 180))
        yield endpoint
    finally:
        asyncio.run(stop(started, 10.0))
