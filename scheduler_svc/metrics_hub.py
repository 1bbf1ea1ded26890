"""The parent's sum of its children's metrics: what the scheduler's endpoint tells.

A connection is one child's life. While it lasts its last snapshot counts; when it ends, the counts are kept for good
and the gauges are forgotten. So a total never falls and nothing counts twice, however often a child dies.
"""

import asyncio
import threading
from collections.abc import Iterator

import structlog
from prometheus_client.core import Metric

from scheduler_svc.snapshots import Snapshot, decode, lasting, metrics, total
from shared.framing import read_message

_log = structlog.get_logger(__name__)


class MetricsHub:
    """Takes snapshots in the event loop; is read by the endpoint's threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._past: Snapshot = {}
        self._living: dict[int, Snapshot] = {}
        self._accepted = 0
        self._connections: set[asyncio.Task[None]] = set()

    def read(self) -> Iterator[Metric]:
        """The sum of all, as of now."""
        with self._lock:
            return metrics(total([self._past, *self._living.values()]))

    def opened(self) -> int:
        """A child is there; its number."""
        self._accepted += 1
        return self._accepted

    def told(self, child: int, snapshot: Snapshot) -> None:
        """A child's totals since its start."""
        with self._lock:
            self._living[child] = snapshot

    def closed(self, child: int) -> None:
        """The child is gone."""
        with self._lock:
            self._past = total([self._past, lasting(self._living.pop(child, {}))])

    async def serve(self, path: str) -> asyncio.Server:
        """Accepts children on the Unix socket `path`."""
        return await asyncio.start_unix_server(self._accept, path, limit=1 << 20)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """No coroutine: asyncio would report the end of one that is cancelled when the process stops as an error."""
        task = asyncio.create_task(self._follow(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        child = self.opened()
        try:
            while (payload := await read_message(reader)) is not None:
                self.told(child, decode(payload))
        except (OSError, ValueError) as error:
            _log.warning("metrics of a process end", reason=str(error))
        finally:
            writer.close()
            self.closed(child)
