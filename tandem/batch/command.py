"""`tandem batch`: computes what the output file does not have yet, so many requests at a time.

A line is written once its request has ended, and its request is not computed again. What runs when the process is
killed has no line, and is computed by the next run.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shared.errors import PermissionDenied, QueueFull, StartupError, TandemError, Unauthenticated, Unavailable
from shared.security import PLAIN, ClientSecurity
from tandem.async_client import AsyncClient
from tandem.batch.answers import error_of, response_of
from tandem.batch.bodies import work_of
from tandem.batch.config import BatchConfig
from tandem.batch.journal import Journal
from tandem.batch.request_lines import RequestLine, custom_ids, requests
from tandem.values import Completion

RETRY_S = 1.0
PATIENCE_S = 300.0
"""How long a service may be away, no request ending meanwhile, before the run ends."""

_AWAY = (Unavailable, QueueFull)
"""A client gives a request up with these where it was lost and can't go on for as long as it may resume."""
_NOBODYS_FAULT = (*_AWAY, Unauthenticated, PermissionDenied)
"""They say nothing of a request: another run computes it, with a token that counts."""


def run(endpoint: str, source: Path, target: Path, config: BatchConfig, security: ClientSecurity = PLAIN) -> str | None:
    """Computes a batch; what the caller must hear if not every request succeeded.

    Raises StartupError for a bad file, Unavailable or QueueFull where the service is not there or stays away,
    Unauthenticated or PermissionDenied where it does not take the token any more, TandemError after Ctrl-C.
    """
    try:
        ids, journal = custom_ids(source), Journal(target)
    except OSError as error:
        raise StartupError(f"{error.filename}: {error.strerror}") from None
    with journal:
        if strangers := journal.done - ids:
            raise StartupError(f"{target}: has {min(strangers)!r}, {source} has not; give another output file")
        try:
            asyncio.run(_Batch(endpoint, source, journal, len(ids), config, security).run())
        except _NOBODYS_FAULT as error:
            raise type(error)(f"{error}; {_left(ids, journal)}") from None
        except KeyboardInterrupt:
            raise TandemError(f"stopped; {_left(ids, journal)}") from None
        assert journal.done == ids, "every request has a line"
        if journal.failed:
            return f"{journal.failed} of {len(ids)} requests failed: see status_code in {target}"
        return None


def _left(ids: set[str], journal: Journal) -> str:
    return f"{len(ids) - len(journal.done)} of {len(ids)} requests are left: run the same again"


class _Batch:
    def __init__(
        self,
        endpoint: str,
        source: Path,
        journal: Journal,
        total: int,
        config: BatchConfig,
        security: ClientSecurity,
    ) -> None:
        self._endpoint = endpoint
        self._security = security
        self._source = source
        self._journal = journal
        self._total = total
        self._config = config
        self._ended: list[dict[str, Any]] = []
        """Lines that are not written yet."""
        self._succeeded = time.monotonic()
        self._model_name = ""

    async def run(self) -> None:
        """Returns when the journal has every line."""
        endpoints = self._endpoint.split(",")
        async with AsyncClient(
            endpoints, security=self._security, resume_timeout=PATIENCE_S, queue_timeout=math.inf
        ) as client:
            self._model_name = (await client.model_info()).model_name
            left = (request for request in requests(self._source) if request.custom_id not in self._journal.done)
            with self._progress() as show:
                try:
                    async with asyncio.TaskGroup() as workers:
                        for _ in range(self._config.max_concurrency):
                            workers.create_task(self._work(client, left, show))
                except* (TandemError, OSError) as errors:
                    raise errors.exceptions[0] from None
                finally:
                    self._write(show)

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Callable[[], None]]:
        """Gives what to call when lines have been written."""
        counts = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        columns = TextColumn("{task.description}"), *counts, TextColumn("{task.fields[failed]} failed")
        with Progress(*columns, console=Console(stderr=True)) as bars:
            bar = bars.add_task(self._source.name, total=self._total, failed=0)

            def show() -> None:
                bars.update(bar, completed=len(self._journal.done), failed=self._journal.failed)

            show()
            yield show

    async def _work(self, client: AsyncClient, left: Iterator[RequestLine], show: Callable[[], None]) -> None:
        for request in left:
            line = await self._line(client, request)
            self._ended.append(line)
            await asyncio.sleep(0)  # what has ended by now goes with it: one wait for the disk
            self._write(show)

    def _write(self, show: Callable[[], None]) -> None:
        ended, self._ended = self._ended, []
        if ended:
            self._journal.append(ended)
            show()

    async def _line(self, client: AsyncClient, request: RequestLine) -> dict[str, Any]:
        try:
            work = work_of(request, self._model_name)
            if self._config.timeout is not None:
                work.options["timeout"] = self._config.timeout
            completions = [await self._complete(client, prompt, work.options) for prompt in work.prompts]
        except _NOBODYS_FAULT:
            raise
        except TandemError as error:
            return error_of(request, error)
        self._succeeded = time.monotonic()
        return response_of(request, self._model_name, completions)

    async def _complete(self, client: AsyncClient, prompt: Any, options: dict[str, Any]) -> Completion:
        """Waits for a service that is away: raises one of _AWAY only if it stays away."""
        while True:
            try:
                return await client.complete(prompt, **options)
            except _AWAY:
                if time.monotonic() - self._succeeded > PATIENCE_S:
                    raise
                await asyncio.sleep(RETRY_S)
