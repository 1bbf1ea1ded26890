"""A worker whose steps wait while a test wants them to: no request can end by itself, however slow the test is.

It lives and answers all the while, unlike one that is stopped, which counts as lost after some seconds.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

HOOK = """
import os, sys, time

if "worker_svc.main" in sys.orig_argv:
    from worker_svc.runner.runner import TorchRunner

    step = TorchRunner.step

    def waiting(self, plan):
        while len(plan.rows) and os.path.exists(os.environ["STAND_STILL"]):
            time.sleep(0.01)
        return step(self, plan)

    TorchRunner.step = waiting
"""
"""Run at the start of every interpreter."""


class StandingStill:
    """What services are started with, and when their workers stand still."""

    arguments = ("--step-timeout", "600")
    """Of schedulers and workers: a step may take as long as the test."""

    def __init__(self, folder: Path) -> None:
        (folder / "sitecustomize.py").write_text(HOOK)
        self._order = folder / "stand-still"
        self.env = {"PYTHONPATH": os.pathsep.join([str(folder), os.getcwd()]), "STAND_STILL": str(self._order)}

    @contextlib.contextmanager
    def now(self) -> Iterator[None]:
        """Within, no step begins that has rows."""
        self._order.touch()
        try:
            yield
        finally:
            self._order.unlink()
