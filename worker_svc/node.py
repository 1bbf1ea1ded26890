"""The ranks of one node, watched from their start to their end, and what its links to the other nodes say meanwhile.

Knows neither how ranks are started nor how nodes meet.
"""

import asyncio
import contextlib
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from shared.errors import StartupError, TandemError
from shared.ports import address
from shared.process import STARTUP_FAILED
from worker_svc.config import WorkerConfig
from worker_svc.node_health import NodeHealth
from worker_svc.node_link import Kind, NodeLink
from worker_svc.progress import Watch, all_warm, create_cells

_POLL_S = 0.1
_EXIT_S = 5.0  # from the end of draining to the end of the processes


class WorkerFailed(TandemError):
    """A rank ended or hung, so the group can't go on."""


class Node:
    """To be run once its ranks are started."""

    def __init__(
        self, config: WorkerConfig, links: Sequence[NodeLink], folder: Path, health: NodeHealth | None
    ) -> None:
        """Makes the cells of progress in the folder. `health` is told whether the node is ready."""
        self.ranks: list[subprocess.Popen[bytes]] = []
        self._config = config
        self._leads = config.node_rank == 0
        self._links = links
        self._folder = folder
        self._health = health
        self._cells = create_cells(folder / "progress", len(config.ranks))
        self._watch = Watch(self._cells, config.step_timeout, config.ranks.start)
        self._is_warm = False
        self._signals = 0
        self._drained_by: float | None = None

    async def run(self, stopped: asyncio.Event) -> None:
        """Until it is told to stop, by a signal here or by another node, and has drained; a second signal ends that.

        Raises what happened to the first rank that ends or hangs, or to another node.
        """
        try:
            while not self._is_over():
                await self._look()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopped.wait(), _POLL_S)
                    stopped.clear()
                    self._signals += 1
            if self._leads:
                self._say(Kind.END)
        except TandemError as error:
            self._say(Kind.FAILED, reason=str(error))
            raise

    def _is_over(self) -> bool:
        """Only rank 0 has something to save: when it has ended, all have, and node 0 says so."""
        if self._signals > 1 or any(Kind.END in link.said for link in self._links):
            return True
        if not self._leads or self._drained_by is None:
            return False
        return self.ranks[0].poll() is not None or monotonic() > self._drained_by

    async def _look(self) -> None:
        for link in self._links:
            link.check()
        if self._drained_by is not None:
            return
        if self._signals or any(Kind.DRAIN in link.said for link in self._links):
            await self._drain()
            return
        self._check_ranks()
        if not self._is_warm and all_warm(self._cells):
            await self._warm()

    def _check_ranks(self) -> None:
        for rank, process in zip(self._config.ranks, self.ranks, strict=True):
            if process.poll() is not None:
                raise self._ended(rank, process.returncode)
        if stalled := self._watch.find_stalled():
            raise WorkerFailed(f"{stalled}: the worker ends")

    def _ended(self, rank: int, status: int) -> TandemError:
        if status == STARTUP_FAILED:
            return StartupError((self._folder / f"{rank}.error").read_text(encoding="utf-8"))
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        return WorkerFailed(f"rank {rank} {how}: the worker ends")

    async def _warm(self) -> None:
        self._is_warm = True
        # Mapped and connected: nothing is left behind should this process be killed.
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._health is not None:
            await self._health.tell(ready=True)
            print(self._ready_line(), flush=True)

    def _ready_line(self) -> str:
        """Of a node whose ranks print none."""
        config = self._config
        ranks = ", ".join(map(str, config.ranks))
        where = address(config.host, config.port)
        return f"tandem worker node {config.node_rank} of {config.nnodes} ready (ranks {ranks}, health on {where})"

    async def _drain(self) -> None:
        """Rank 0 does. The other nodes know that their ranks may end, or tell node 0 to begin."""
        self._drained_by = monotonic() + self._config.drain_timeout + _EXIT_S
        self._say(Kind.DRAIN)
        if self._leads:
            self.ranks[0].terminate()
        if self._health is not None:
            await self._health.tell(ready=False)

    def _say(self, kind: Kind, **body: Any) -> None:
        for link in self._links:
            link.say(kind, **body)
