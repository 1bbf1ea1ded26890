"""Child processes: started so that they can't outlive their parent, stopped politely, then surely."""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

_PARENT = "TANDEM_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def spawn(module: str, arguments: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Starts `python -m module arguments` as a child of this process. The module's main calls die_with_parent()."""
    environment = {**os.environ, **(env or {}), _PARENT: str(os.getpid())}
    return subprocess.Popen([sys.executable, "-m", module, *arguments], stdin=subprocess.DEVNULL, env=environment)


def die_with_parent() -> None:
    """Has the kernel kill this process when the parent that spawned it dies, by whatever cause."""
    parent = os.environ.pop(_PARENT, None)
    if parent is None:
        return  # started by hand
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before the line above
        os._exit(1)


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


def kill(children: Iterable[subprocess.Popen[bytes]]) -> None:
    """SIGKILL to all that run, also to stopped ones; waits for the last."""
    running = [child for child in children if child.poll() is None]
    for child in running:
        child.kill()
    for child in running:
        child.wait()
