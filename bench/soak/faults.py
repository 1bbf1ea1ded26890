"""Faults of a soak: what may happen to a service, and when. The schedule follows from the seed alone."""

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import psutil

from bench.soak.link import Link
from bench.soak.service import Service

CUT_S = 1.0
DELAY_S = 0.03


@dataclass(frozen=True, slots=True)
class Fault:
    """One, at its time."""

    at_s: float
    """Seconds after the first request."""
    name: str
    choice: float
    """Which process or link of those that it may be, within [0, 1)."""


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that happened."""

    at_s: float
    name: str
    victim: str


def schedule(seed: int, seconds: float, every: float) -> Iterator[Fault]:
    """About one `every` so many seconds; each kind comes once before any comes again.

    Processes die in the first four fifths: what lives then shall show whether its memory grows.
    """
    source, at = random.Random(seed), 0.0
    bag: list[str] = []
    while (at := at + source.uniform(0.5, 1.5) * every) < seconds:
        bag = bag or source.sample(list(FAULTS), len(FAULTS))
        name = bag.pop()
        if at < 0.8 * seconds or name.startswith("link"):
            yield Fault(at, name, source.random())


async def strike(service: Service, fault: Fault, stopped_s: float) -> str | None:
    """Does it, until it is over; what it hit, None where nothing was there. Stopped processes go on after a while."""
    return await FAULTS[fault.name](service, fault.choice, stopped_s)


Strike = Callable[[Service, float, float], Awaitable[str | None]]


def _signalled(role: str, number: signal.Signals) -> Strike:
    async def run(service: Service, choice: float, stopped_s: float) -> str | None:
        processes = service.processes(role)
        if not processes:
            return None
        victim = processes[int(choice * len(processes))]
        with suppress(psutil.NoSuchProcess):
            victim.send_signal(number)
            if number == signal.SIGSTOP:
                await asyncio.sleep(stopped_s)
                victim.send_signal(signal.SIGCONT)
        return f"{role} {victim.pid}"

    return run


def _on_link(begin: Callable[[Link], None], seconds: float | None) -> Strike:
    async def run(service: Service, choice: float, stopped_s: float) -> str | None:
        number = int(choice * len(service.links))
        link = service.links[number]
        begin(link)
        await asyncio.sleep(stopped_s if seconds is None else seconds)
        link.mend()
        return f"link {number}"

    return run


def _cut(link: Link) -> None:
    link.is_cut = True
    link.cut()


def _black_hole(link: Link) -> None:
    link.there.clear()
    link.back.clear()


def _slow(link: Link) -> None:
    link.delay_s = DELAY_S


FAULTS: dict[str, Strike] = {
    "worker SIGKILL": _signalled("launcher", signal.SIGKILL),
    "worker SIGSTOP": _signalled("launcher", signal.SIGSTOP),
    "worker SIGTERM": _signalled("launcher", signal.SIGTERM),
    "rank SIGKILL": _signalled("rank", signal.SIGKILL),
    "rank SIGSTOP": _signalled("rank", signal.SIGSTOP),
    "core SIGKILL": _signalled("core", signal.SIGKILL),
    "core SIGSTOP": _signalled("core", signal.SIGSTOP),
    "frontend SIGKILL": _signalled("frontend", signal.SIGKILL),
    "frontend SIGSTOP": _signalled("frontend", signal.SIGSTOP),
    "scheduler SIGKILL": _signalled("scheduler", signal.SIGKILL),
    "scheduler SIGTERM": _signalled("scheduler", signal.SIGTERM),
    "link cut": _on_link(_cut, CUT_S),
    "link black hole": _on_link(_black_hole, None),
    "link black hole there": _on_link(lambda link: link.there.clear(), None),
    "link black hole back": _on_link(lambda link: link.back.clear(), None),
    "link delay": _on_link(_slow, 3.0),
}
