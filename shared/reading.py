"""Ends the streams of clients that don't read: what is written waits for them, and so does all that comes after.

Knows nothing of what is written. One timer watches all streams, so that a message costs nothing more.
"""

import asyncio
from typing import Any

from grpc import aio

from shared.errors import LimitExceeded


class Writes:
    """The writes in progress of one server."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: how long a client may leave a message untaken."""
        self._timeout = timeout_s
        self._writing: dict[asyncio.Task[Any], float] = {}
        """Since when each task writes, the oldest first."""
        self._stalled: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def write(self, context: Any, message: Any) -> None:
        """Raises LimitExceeded where the client doesn't take the message in time; the call can go on to its status."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None, "calls are tasks"
        self._writing[task] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self._timeout, self._check, loop)
        try:
            await context.write(message)
        except aio.InternalError:  # the client has left, which its call will be told in a moment
            raise asyncio.CancelledError from None
        except asyncio.CancelledError:
            if task not in self._stalled:
                raise
            task.uncancel()
            problem = f"the client has not read for {self._timeout:g} s what it asked for"
            raise LimitExceeded(problem) from None
        finally:
            del self._writing[task]
            self._stalled.discard(task)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ends what takes too long, and comes back when the next one would."""
        self._timer, now = None, loop.time()
        for task, since in self._writing.items():
            if now - since < self._timeout:
                self._timer = loop.call_later(since + self._timeout - now, self._check, loop)
                break
            if task not in self._stalled:
                self._stalled.add(task)
                task.cancel()
