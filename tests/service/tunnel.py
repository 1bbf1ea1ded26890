"""A link between two network namespaces that this process holds: packets pass, are late, or are lost, each way alone.

Two TUN devices, since few machines let anyone set up tc's netem. Needs root.
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from dataclasses import dataclass

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000
_MOST_BYTES = 1 << 16
_POLL_S = 0.05


@dataclass
class Way:
    """What happens to packets in one direction."""

    is_down: bool = False
    """They are dropped, and nobody is told."""
    delay_s: float = 0.0
    loss: float = 0.0
    """Share of them that is dropped."""


class Tunnel:
    """Joins the namespaces of two processes; each end has an address."""

    def __init__(self, pids: tuple[int, int], addresses: tuple[str, str]) -> None:
        self.ways = (Way(), Way())
        """From the first to the second, and back."""
        ends = zip(pids, addresses, reversed(addresses), strict=True)
        self._ends = [_open(pid, own, other) for pid, own, other in ends]
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._pass, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Removes the devices."""
        self._closing.set()
        self._thread.join()
        for end in self._ends:
            os.close(end)

    def _pass(self) -> None:
        late: list[tuple[float, int, int, bytes]] = []
        count = 0
        while not self._closing.is_set():
            while late and late[0][0] <= time.monotonic():
                _, _, end, packet = heapq.heappop(late)
                os.write(end, packet)
            for end in select.select(self._ends, [], [], _POLL_S if not late else 0.001)[0]:
                number = self._ends.index(end)
                packet, way = os.read(end, _MOST_BYTES), self.ways[number]
                if not way.is_down and random.random() >= way.loss:
                    count += 1
                    heapq.heappush(late, (time.monotonic() + way.delay_s, count, self._ends[1 - number], packet))


def _open(pid: int, own: str, other: str) -> int:
    """A TUN device in the namespace of a process, up, with its address."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(_open_here(pid)))
    thread.start()  # a thread of its own: it ends in another namespace than it began in
    thread.join()
    for words in (["addr", "add", own, "peer", other, "dev", "tun0"], ["link", "set", "tun0", "up"]):
        run_in(pid, "ip", *words)
    return found[0]


def _open_here(pid: int) -> int:
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(namespace)
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", b"tun0", _IFF_TUN | _IFF_NO_PI))
    return device


def run_in(pid: int, *words: str) -> None:
    """Runs a command in the network namespace of a process."""
    subprocess.run(["nsenter", "--target", str(pid), "--net", *words], check=True)
