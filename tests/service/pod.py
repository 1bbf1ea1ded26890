"""A command that is started again whenever it ends, as a container of a pod is."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from tests.patience import PATIENCE_S


class Pod:
    """`tandem ...` until `stop`; it leaves nothing behind. What it writes is added to `log`."""

    def __init__(
        self, log: Path, *arguments: str, before: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> None:
        """`before`: words of the command that starts the program, such as `ip netns exec NAME`."""
        self.log = log
        self.statuses: list[int] = []
        """With which it has ended, each time."""
        self._command = [*before, sys.executable, "-m", "tandem", *arguments]
        self._env = {**os.environ, "TMPDIR": str(log.parent), **(env or {})}
        self._is_kept = True
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()
        self._started.wait()

    def _keep(self) -> None:
        with self.log.open("w") as log:
            while self._is_kept:
                self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._env)
                self._started.set()
                self.statuses.append(self.process.wait())

    def main(self) -> psutil.Process:
        """The program's first process."""
        return psutil.Process(self.process.pid)

    def ranks(self) -> list[psutil.Process]:
        """Of a worker that runs."""
        return [child for child in self.main().children(recursive=True) if "worker_svc.main" in child.cmdline()]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for something about it."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}: never\n{self.log.read_text()}"
            time.sleep(0.02)

    def until_said(self, text: str) -> None:
        """Waits for it in the log."""
        self.until(lambda: text in self.log.read_text(), text)

    def until_ended(self, times: int = 1) -> int:
        """Waits until it has ended so often; the last status."""
        self.until(lambda: len(self.statuses) >= times, f"{times} ends")
        return self.statuses[-1]

    def let_end(self) -> None:
        """It is not started again."""
        self._is_kept = False

    def stop(self) -> None:
        """Kills what is left of it."""
        self.let_end()
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*self.main().children(recursive=True), self.main()]:
                process.kill()
        self._thread.join(PATIENCE_S)
