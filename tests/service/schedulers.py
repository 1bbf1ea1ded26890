"""Schedulers before a worker that outlives them, and clients whose streams are disturbed.

The oracle is the undisturbed run, in float64. Streams are those of the client library.
"""

import asyncio
import contextlib
import itertools
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from shared.ports import find_free
from shared.rpc import until_serving
from tandem import AsyncClient, Delta
from tests.patience import PATIENCE_S

WANTED: list[tuple[Any, dict[str, Any]]] = [
    ("It is a truth universally", {"max_tokens": 150, "temperature": 0.8, "seed": 1, "ignore_eos": True}),
    ("It is a truth universally", {"max_tokens": 150, "temperature": 0.0, "ignore_eos": True}),
    (
        [{"role": "user", "content": "Who are you?"}],
        {"max_tokens": 120, "temperature": 1.0, "seed": 3, "min_tokens": 120, "top_k": 20},
    ),
    ("She said", {"max_tokens": 100, "temperature": 1.0, "seed": 4, "n": 3, "ignore_eos": True}),
    (
        "It is a truth",
        {"max_tokens": 120, "seed": 6, "logprobs": 2, "prompt_logprobs": 1, "echo": True, "frequency_penalty": 0.5},
    ),
    ("Names: ", {"seed": 7, "max_tokens": 150, "regex": "([a-z]{3,9}, ){40}"}),
    ("It is", {"max_tokens": 400, "min_tokens": 90, "temperature": 0.9, "seed": 5, "stop": [" the ", "ing"]}),
]
"""Prompts and options: streams long enough to be cut, in every way that a resumed one could go wrong."""


class Scheduler:
    """`tandem scheduler` on a fixed port."""

    def __init__(self, worker: str, log: Path, *more: str, port: int | None = None) -> None:
        self.endpoint = f"127.0.0.1:{port or find_free('127.0.0.1')}"
        arguments = ["--model", "tiny", "--workers", worker, "--port", self.endpoint.rpartition(":")[2], *more]
        self._command = [sys.executable, "-m", "tandem", "scheduler", *arguments]
        self._log = log
        self.start()

    def start(self) -> None:
        """On the same port each time."""
        with self._log.open("a") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def ready(self) -> None:
        """Waits until it serves."""
        asyncio.run(asyncio.wait_for(until_serving(self.endpoint, "tandem.Active"), PATIENCE_S))

    def family(self) -> list[psutil.Process]:
        """Parent, core and frontends."""
        parent = psutil.Process(self._process.pid)
        return [parent, *parent.children(recursive=True)]

    def send(self, number: signal.Signals) -> None:
        """A signal to all of them."""
        assert len(self.family()) >= 3
        for process in self.family():
            process.send_signal(number)

    def kill(self) -> None:
        """All at once."""
        self.send(signal.SIGSTOP)  # else one could see another's end and tell the client
        for process in self.family():
            process.kill()
        self._process.wait()

    def terminate(self) -> int:
        """As an operator does it; its exit status."""
        self._process.terminate()
        return self._process.wait(timeout=PATIENCE_S)

    def kill_and_restart(self) -> None:
        """As a supervisor would have it."""
        self.kill()
        self.start()


class Worker:
    """`tandem worker` in float64 on a fixed port."""

    def __init__(self, log: Path) -> None:
        port = find_free("127.0.0.1")
        self.endpoint = f"127.0.0.1:{port}"
        arguments = ["--model", "tiny", "--port", str(port), "--dtype", "float64", "--kv-cache-memory", "64"]
        self._command = [sys.executable, "-m", "tandem", "worker", *arguments]
        self._log = log
        self.start()

    def start(self) -> None:
        """On the same port each time."""
        with self._log.open("a") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def stop(self) -> None:
        """It ends when no scheduler holds it."""
        self._process.terminate()
        self._process.wait()

    def kill_and_restart(self) -> None:
        """As a supervisor would have it."""
        self._process.kill()
        self._process.wait()
        self.start()


@contextlib.contextmanager
def running_worker(log: Path) -> Iterator[Worker]:
    """A worker, stopped at the end."""
    worker = Worker(log)
    try:
        yield worker
    finally:
        worker.stop()


PARTS = ("token_ids", "logprobs", "prompt_logprobs")


def joined(deltas: list[Delta]) -> list[Any]:
    """What a caller has of each sample in the end: text, ids, finish, usage, logprobs, the prompt's, its echo."""
    samples = []
    for index in sorted({delta.index for delta in deltas}):
        *others, last = [delta for delta in deltas if delta.index == index]
        assert all(delta.finish is None for delta in others)
        text, *parts = ([getattr(delta, name) for delta in (*others, last)] for name in ("text", *PARTS))
        token_ids, *told = (list(itertools.chain.from_iterable(part)) for part in parts)
        echoes = [delta.echo for delta in (*others, last) if delta.echo is not None]
        samples.append(("".join(text), token_ids, last.finish, last.usage, *told, echoes))
    return samples


class Disturbance:
    """Strikes once, when so many tokens have come over all streams, in a thread of its own: the streams go on."""

    def __init__(self, strike: Callable[[], None], after: int) -> None:
        self._strike = strike
        self._left = after
        self._thread = ThreadPoolExecutor(1)
        self._struck: Future[None] | None = None

    def count(self, delta: Delta) -> None:
        """One more piece has come."""
        self._left -= len(delta.token_ids)
        if self._left <= 0 and self._struck is None:
            self._struck = self._thread.submit(self._strike)

    def done(self) -> None:
        """It has struck, and well."""
        assert self._struck is not None, "the streams were too short to disturb"
        self._struck.result()
        self._thread.shutdown()


async def all_at_once(endpoint: str | Sequence[str], disturb: Callable[[Delta], None]) -> list[Any]:
    """AsyncClient: every wanted request at the same time."""

    async def one(client: AsyncClient, prompt: Any, options: dict[str, Any]) -> Any:
        deltas = []
        async for delta in client.generate(prompt, **options):
            deltas.append(delta)
            disturb(delta)
        return joined(deltas)

    async with AsyncClient(endpoint) as client:
        return await asyncio.wait_for(asyncio.gather(*(one(client, *wanted) for wanted in WANTED)), PATIENCE_S)


def expected(endpoint: str | Sequence[str]) -> list[Any]:
    """The undisturbed run. The prompts are cached then, for this and for what follows: cached_tokens compare."""
    asyncio.run(all_at_once(endpoint, lambda delta: None))
    return asyncio.run(all_at_once(endpoint, lambda delta: None))
