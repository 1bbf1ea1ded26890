"""`tandem top`: asks a service for its statistics again and again, and shows what that amounts to."""

import contextlib
import time
from collections import deque
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live

from shared.errors import TandemError
from tandem.client import Client
from tandem.top_view import Frame, view
from tandem.values import Stats

SPARKS = 40
LATEST = 256


@dataclass(frozen=True, slots=True)
class _Poll:
    at: float
    stats: Stats


class Watch:
    """Polls one service and turns two polls into a frame."""

    def __init__(self, client: Client, endpoint: str) -> None:
        """Raises Unavailable where nothing answers."""
        self._client = client
        self._endpoint = endpoint
        self._rates: deque[float] = deque(maxlen=SPARKS)
        self._before = self._poll()

    def _poll(self) -> _Poll:
        return _Poll(time.monotonic(), self._client.stats(LATEST))

    def frame(self) -> Frame:
        """What happened since the last one. Raises what the client raises."""
        before, now = self._before, self._poll()
        self._before = now
        seconds = now.at - before.at
        if now.stats.uptime_s < before.stats.uptime_s:  # another core process: its counters began at 0
            before = _Poll(now.at - now.stats.uptime_s, Stats(now.stats.load, 0.0, 0, 0, 0, 0, 0, ()))
            seconds = now.stats.uptime_s
        generated = (now.stats.generation_tokens - before.stats.generation_tokens) / seconds
        self._rates.append(generated)
        return Frame(
            endpoint=self._endpoint,
            model=self._client.model_info() if now.stats.load.max_running else None,
            stats=now.stats,
            generation_rate=generated,
            generation_rates=tuple(self._rates),
            prompt_rate=(now.stats.prompt_tokens - before.stats.prompt_tokens) / seconds,
            request_rate=(now.stats.requests - before.stats.requests) / seconds,
        )


def run(client: Client, endpoint: str, interval_s: float, *, once: bool) -> None:
    """Shows frame after frame until Ctrl-C; with `once` prints the first."""
    watch = Watch(client, endpoint)
    with contextlib.suppress(KeyboardInterrupt):
        time.sleep(interval_s)
        frame = watch.frame()
        if once:
            Console().print(view(frame))
        else:
            _live(watch, frame, interval_s)


def _live(watch: Watch, frame: Frame, interval_s: float) -> None:
    """A service that goes away is waited for."""
    with Live(view(frame), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            problem = None
            try:
                frame = watch.frame()
            except TandemError as error:
                problem = str(error)
            live.update(view(frame, problem), refresh=True)
