"""A network between namespaces, held by this process: each has a link, whose packets pass, are late, lost or refused.

TUN devices, one in each namespace, since few machines let anyone set up tc's netem or a firewall. IPv4. Needs root.
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import subprocess
import threading
import time
from dataclasses import dataclass, field

from tests.net.reset import reset

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000
_MOST_BYTES = 1 << 16
_POLL_S = 0.05
_SOONEST_S = 0.001


@dataclass
class Way:
    """What happens to packets in one direction of a link."""

    is_down: bool = False
    """They are dropped, and nobody is told."""
    refuses: bool = False
    """They are dropped, and their sender's connection is reset."""
    delay_s: float = 0.0
    loss: float = 0.0
    """Share of them that is dropped."""


@dataclass
class Link:
    """Of one namespace to all others."""

    device: int
    observes: bool = False
    """What goes to it and comes from it passes at once, whatever happens to the other's link."""
    sent: Way = field(default_factory=Way)
    received: Way = field(default_factory=Way)

    def cut(self, *, sent: bool = True, received: bool = True) -> None:
        """It swallows what is sent, what would be received, or both."""
        self.sent.is_down, self.received.is_down = sent, received

    def heal(self) -> None:
        """Nothing is dropped any more but by chance."""
        for way in (self.sent, self.received):
            way.is_down = way.refuses = False


class Switch:
    """Joins namespaces, each by an address of one /24."""

    def __init__(self) -> None:
        self.links: dict[str, Link] = {}
        self._late: list[tuple[float, int, int, bytes]] = []
        self._count = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._pass, daemon=True)
        self._thread.start()

    def add(self, pid: int, address: str, *, observes: bool = False) -> Link:
        """A link for the namespace of a process."""
        link = self.links[address] = Link(_open(pid, address), observes)
        return link

    def close(self) -> None:
        """Removes the devices."""
        self._closing.set()
        self._thread.join()
        for link in self.links.values():
            os.close(link.device)

    def _pass(self) -> None:
        while not self._closing.is_set():
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, device, packet = heapq.heappop(self._late)
                os.write(device, packet)
            links = {link.device: link for link in list(self.links.values())}
            for device in select.select(list(links), [], [], _SOONEST_S if self._late else _POLL_S)[0]:
                self._take(links[device], os.read(device, _MOST_BYTES))

    def _take(self, sender: Link, packet: bytes) -> None:
        receiver = self.links.get(socket.inet_ntoa(packet[16:20]))
        if packet[0] >> 4 != 4 or receiver is None:
            return
        ways = [] if sender.observes or receiver.observes else [sender.sent, receiver.received]
        if any(way.refuses for way in ways):
            if answer := reset(packet):
                self._send(sender, answer, 0.0)
        elif not any(way.is_down or random.random() < way.loss for way in ways):
            self._send(receiver, packet, sum(way.delay_s for way in ways))

    def _send(self, link: Link, packet: bytes, delay_s: float) -> None:
        self._count += 1
        heapq.heappush(self._late, (time.monotonic() + delay_s, self._count, link.device, packet))


def _open(pid: int, address: str) -> int:
    """A TUN device in the namespace of a process, up, with its address."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(_open_here(pid)))
    thread.start()  # a thread of its own: it ends in another namespace than it began in
    thread.join()
    for words in (["addr", "add", f"{address}/24", "dev", "tun0"], ["link", "set", "tun0", "up"]):
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
