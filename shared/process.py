"""Child processes: started so that they can't outlive their parent, stopped politely, then surely."""

import asyncio
import contextlib
import ctypes
import itertools
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence

import structlog

STARTUP_FAILED = 3
"""Exit status of a process that can't start and has said why: starting it again would not help."""

SHORTEST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
"""Between the end of a child and its next start; doubled while it keeps ending sooner than this."""
INSIST_S = 0.2
INSIST_TIMES = 10
"""How often, and how many times, children are told to stop that shall not finish what they do."""

MOST_FILES = 1 << 20
"""That a process opens, whatever it may."""

MOST_EARLY_STARTS = 5
"""Starts of a child that keeps ending before all are ready; then the family gives up."""

_log = structlog.get_logger(__name__)

_PARENT = "TANDEM_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def spawn(
    module: str,
    arguments: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    quiet: bool = False,
    stdio: socket.socket | None = None,
    listener: socket.socket | None = None,
) -> subprocess.Popen[bytes]:
    """Starts `python -m module arguments` as a child of this process. The module's main calls die_with_parent().

    A quiet child's standard output is dropped; its log on standard error is not. With `stdio`, the other end of a
    socket of the caller's, that is its standard input and output; a `listener` it has by the same handle. The child is
    in a process group of its own: Ctrl-C reaches the parent alone, which then stops its children in the right order.
    """
    handle = None if stdio is None else stdio.fileno()
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.DEVNULL if handle is None else handle,
        stdout=subprocess.DEVNULL if quiet else handle,
        env={**os.environ, **(env or {}), _PARENT: str(os.getpid())},
        process_group=0,
        pass_fds=() if listener is None else (listener.fileno(),),
    )


def die_with_parent() -> None:
    """Has the kernel kill this process when the parent that spawned it dies, by whatever cause."""
    parent = os.environ.pop(_PARENT, None)
    if parent is None:
        return  # started by hand
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before the line above
        os._exit(1)


def raise_file_limit() -> int:
    """Lets this process open as many files as it may, each connection being one; how many that is."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MOST_FILES if most == resource.RLIM_INFINITY else min(most, MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    return files


async def exited(child: subprocess.Popen[bytes]) -> int:
    """Waits for the child's end; its exit status, negative for a signal."""
    if child.poll() is None:
        handle = os.pidfd_open(child.pid)
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(handle, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)
    return child.wait()


async def stop(children: Iterable[subprocess.Popen[bytes]], grace_s: float) -> None:
    """SIGTERM to all, SIGKILL to those that run on after `grace_s` seconds; waits for the last."""
    running = [child for child in children if child.poll() is None]
    for child in running:
        child.terminate()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            for child in running:
                await exited(child)
    kill(running)


async def insist(children: Iterable[subprocess.Popen[bytes]]) -> None:
    """SIGTERM until they end: the second one says not to finish anything, but one that comes too soon after the first
    is taken for it. SIGKILL at last, not at once: they have children and files of their own."""
    running = list(children)
    for _ in range(INSIST_TIMES):
        for child in running:
            child.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(INSIST_S):
                for child in running:
                    await exited(child)
                return
    kill(running)


def kill(children: Iterable[subprocess.Popen[bytes]]) -> None:
    """SIGKILL to all that run, also to stopped ones; waits for the last."""
    running = [child for child in children if child.poll() is None]
    for child in running:
        child.kill()
    for child in running:
        child.wait()


@contextlib.contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """An event that SIGINT, SIGTERM and SIGHUP (a terminal that is closed) set, in place of what they do otherwise.

    A signal that is ignored from the start stays so: nohup ignores SIGHUP.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    numbers = [number for number in kinds if signal.getsignal(number) is not signal.SIG_IGN]
    for number in numbers:
        loop.add_signal_handler(number, stopped.set)
    try:
        yield stopped
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


class Supervisor:
    """Keeps children running: starts each again that ends."""

    def __init__(self) -> None:
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._is_ready = False

    def start(self, name: str, module: str, arguments: Sequence[str], *, quiet: bool = False) -> None:
        """Starts `python -m module arguments` and keeps it running until stop()."""
        self._tasks.append(asyncio.create_task(self._keep(name, module, arguments, quiet)))

    async def _keep(self, name: str, module: str, arguments: Sequence[str], quiet: bool) -> None:
        pause_s = SHORTEST_PAUSE_S
        for start in itertools.count(1):
            started = time.monotonic()
            child = self.children[name] = spawn(module, arguments, quiet=quiet)
            status = await exited(child)
            if not self._is_ready and (status == STARTUP_FAILED or start == MOST_EARLY_STARTS):
                if status != STARTUP_FAILED:
                    _log.error("process can't start: see its messages above", name=name, status=status, starts=start)
                return
            if time.monotonic() - started > LONGEST_PAUSE_S:
                pause_s = SHORTEST_PAUSE_S
            _log.warning("process ended and is started again", name=name, status=status, pause_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def run(self, stopped: asyncio.Event, ready: Coroutine[None, None, None], announcement: str) -> bool:
        """Until `stopped` is set, or a child can't start before all was ready; whether the latter. Clears `stopped`.

        Prints the announcement when `ready` returns.
        """
        announcing = asyncio.create_task(self._announce(ready, announcement))
        stopping, failing = asyncio.create_task(stopped.wait()), asyncio.create_task(self.failed())
        await asyncio.wait([stopping, failing], return_when=asyncio.FIRST_COMPLETED)
        for task in (announcing, stopping, failing):
            task.cancel()
        stopped.clear()
        return failing.done() and failing.result()

    async def failed(self) -> bool:
        """Waits until a child can't start; True. Raises what kept one from being started again."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        return True

    async def _announce(self, ready: Coroutine[None, None, None], announcement: str) -> None:
        await ready
        self._is_ready = True
        print(announcement, flush=True)

    async def stop(self, names: Iterable[str], grace_s: float, hurry: asyncio.Event) -> None:
        """Stops these children for good: politely, then surely; when `hurry` is set they are told a second time."""
        for task in self._tasks:
            task.cancel()
        children = [self.children[name] for name in names if name in self.children]
        stopping = asyncio.create_task(stop(children, grace_s))
        hurrying = asyncio.create_task(hurry.wait())
        await asyncio.wait([stopping, hurrying], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        hurrying.cancel()
        await insist(children)
