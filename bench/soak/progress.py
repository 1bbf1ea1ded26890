"""What a soak tells while it runs, on standard error: a terminal has one line that changes, a file gets several."""

import asyncio
import sys
import time

from bench.soak.report import Report

TERMINAL_S = 1.0
FILE_S = 10.0
CLEARED = "\r\x1b[K"


class Progress:
    """Begins with the first request that a fault may meet."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._is_terminal = sys.stderr.isatty()
        self._began = time.monotonic()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await asyncio.sleep(TERMINAL_S if self._is_terminal else FILE_S)
                self._tell(line(self._report, time.monotonic() - self._began))
        finally:
            if self._is_terminal:
                print(CLEARED, end="", file=sys.stderr, flush=True)

    def _tell(self, text: str) -> None:
        if self._is_terminal:
            print(CLEARED + text, end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)


def line(report: Report, elapsed: float) -> str:
    """What has happened within `elapsed` seconds, in less than a terminal's width."""
    tally = report.tally
    fault = report.faults[-1].name if report.faults else "none yet"
    return (
        f"{_clock(elapsed)}/{_clock(report.seconds)}  {tally.ended:,} requests, {tally.ended / elapsed:.1f}/s  "
        f"{len(report.faults)} faults, last {fault}  lost {len(tally.lost)}, wrong {len(tally.wrong)}"
    )


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
