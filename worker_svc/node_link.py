"""The connection between the launchers of two nodes: each says all the time that it turns, and what comes to pass.

Ranks that are idle wait for each other in a collective without an end; so it is here that a lost node is noticed.
Messages are lines of JSON. Knows nothing of ranks, nor of who of the two is node 0.
"""

import asyncio
import contextlib
import json
from enum import StrEnum
from time import monotonic
from typing import Any, TypeAlias

from shared.errors import TandemError

Body: TypeAlias = dict[str, Any]

_BEAT_S = 1.0
_BEATS = 4  # at least, within the time that a silent node has
_ASLEEP_S = 1.0  # that a beat of one's own may be late


class NodeLost(TandemError):
    """Another node of the group has ended, or can't be reached, so the group can't go on."""


class Kind(StrEnum):
    """Of messages."""

    BEAT = "beat"
    HELLO = "hello"  # node's rank and terms: another node to node 0
    BUSY = "busy"  # reason: node 0 has one of that rank
    REFUSED = "refused"  # reason: the terms differ
    START = "start"  # port and epoch of the store: all nodes have come
    DRAIN = "drain"  # node 0 drains; from another node: it should
    FAILED = "failed"  # reason: the sender ends, and so must the group
    END = "end"  # node 0 has drained


class NodeLink:
    """One such connection, from the other node's first word to its last."""

    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout_s: float) -> None:
        """`name` is the other node's, for people. It counts as lost after `timeout_s` seconds of silence."""
        self.name = name
        # None where the other end has reset the connection already: reading says so.
        self.peer_host: str = (writer.get_extra_info("peername") or ("",))[0]
        self.said: dict[Kind, Body] = {}
        """The last message of each kind."""
        self.lost = ""
        """Why the other node can't be heard any more; empty while it can."""
        self._reader = reader
        self._writer = writer
        self._timeout_s = timeout_s
        self._news = asyncio.Event()
        self._slept_until = 0.0
        self._tasks = [asyncio.create_task(run()) for run in (self._read, self._beat)]

    def say(self, kind: Kind, **body: Any) -> None:
        """Sends a message, or nothing where the connection is closed. Never waits: what is sent is little."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps({"kind": kind, **body}).encode() + b"\n")

    async def until_said(self, *kinds: Kind) -> Kind:
        """Waits for a message of one of these kinds. Raises NodeLost."""
        while True:
            for kind in kinds:
                if kind in self.said:
                    return kind
            self.check()
            self._news.clear()
            await self._news.wait()

    def check(self) -> None:
        """Raises NodeLost where the other node has failed, or can't be heard any more."""
        if Kind.FAILED in self.said:
            raise NodeLost(f"{self.name} has failed: {self.said[Kind.FAILED].get('reason')}")
        if self.lost:
            raise NodeLost(f"{self.name} {self.lost}")

    async def close(self) -> None:
        """What has been said still arrives, if the other node can be reached."""
        for task in self._tasks:
            task.cancel()
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_BEAT_S):
                await self._writer.wait_closed()

    async def _beat(self) -> None:
        pause_s = min(_BEAT_S, self._timeout_s / _BEATS)
        while True:
            self.say(Kind.BEAT)
            began = monotonic()
            await asyncio.sleep(pause_s)
            if monotonic() - began > pause_s + _ASLEEP_S:
                self._slept_until = monotonic()

    async def _line(self) -> bytes:
        """Raises TimeoutError after silence in which this process has turned: while it is stopped it hears nobody."""
        while True:
            began = monotonic()
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._reader.readline()
            except TimeoutError:
                if self._slept_until < began:
                    raise

    async def _read(self) -> None:
        try:
            while True:
                if not (line := await self._line()):
                    self.lost = "has closed its connection: it has ended"
                    return
                message = json.loads(line)
                self.said[Kind(message["kind"])] = message
                self._news.set()
        except TimeoutError:
            self.lost = f"has been silent for {self._timeout_s:g} s"
        except OSError as error:
            self.lost = f"can't be reached any more ({error.strerror})"
        except (ValueError, KeyError, TypeError, RecursionError):
            self.lost = "sends what is no message between nodes: another program uses --master-port"
        finally:
            self._news.set()
