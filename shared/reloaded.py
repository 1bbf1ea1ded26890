"""What is made of files, made again when they change. Knows neither certificates nor tokens."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog

from shared.errors import StartupError
from shared.security import File

T = TypeVar("T")

SETTLED_NS = 1_000_000_000
"""A file that changed less than this ago is read again whatever its times say: they move in ticks, and a second change
within one of them would not be seen."""

_log = structlog.get_logger(__name__)


class Reloaded(Generic[T]):
    """A value made of files' contents. Safe to use from several threads.

    A change that can't be used, half-written files for instance, is logged; what was there before goes on to count.
    """

    def __init__(
        self, files: Mapping[str, File], make: Callable[..., T], first: Callable[..., T] | None = None
    ) -> None:
        """`files` by the flag that names each. `make` is called with their contents, bytes or None for no file, and
        raises ValueError for what can't be used; `first` takes its place for what is there at the start.

        Raises StartupError for that, and for a file that can't be read.
        """
        self._paths = {flag: None if file is None else Path(file) for flag, file in files.items()}
        self._make = first or make
        self._lock = threading.Lock()
        self._seen: Any = None
        self._contents: list[bytes | None] = []
        self._problem = ""
        try:
            self._value = self._load()
        except (OSError, ValueError) as error:
            raise StartupError(self._told(error)) from None
        self._make = make

    def get(self) -> T:
        """As the files are now; the same object while they say the same."""
        with self._lock:
            try:
                self._value = self._load()
                self._problem = ""
            except (OSError, ValueError) as error:
                if self._told(error) != self._problem:
                    self._problem = self._told(error)
                    _log.warning("a changed file can't be used; what it held before counts", problem=self._problem)
            return self._value

    def _load(self) -> T:
        seen = [None if path is None else _times(path) for path in self._paths.values()]
        if seen == self._seen:
            return self._value
        contents = [None if path is None else path.read_bytes() for path in self._paths.values()]
        value = self._value if contents == self._contents else self._make(*contents)
        newest = max(times[0] for times in seen if times is not None)
        self._contents = contents
        self._seen = seen if time.time_ns() - newest > SETTLED_NS else None
        return value

    def _told(self, error: Exception) -> str:
        named = [(flag, path) for flag, path in self._paths.items() if path is not None]
        if isinstance(error, OSError):
            named = [(flag, path) for flag, path in named if str(path) == str(error.filename)]
        problem = error.strerror if isinstance(error, OSError) else error
        return f"{', '.join(f'{flag} {path}' for flag, path in named)}: {problem}"


def _times(path: Path) -> tuple[int, int, int]:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_ino, status.st_size
