"""A batch's output file: lines that are there are there for good, whatever kills the process or the machine.

Knows that a line is a JSON object with a custom_id, and nothing more of it.
"""

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from shared.errors import StartupError


class Journal:
    """An append-only file, open for one process at a time."""

    def __init__(self, path: Path) -> None:
        """Opens or creates it. Cuts off a last line that a death in the middle of a write left torn.

        Raises StartupError where another process has it open, or where it holds anything else than results.
        """
        self._path = path
        existed = path.exists()
        self._file: BinaryIO = path.open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise StartupError(f"{path}: another `tandem batch` is writing to it; wait for it or stop it") from None
        if not existed:
            _sync_folder(path)  # else the name could be lost though the content is not
        self.done: set[str] = set()
        """custom_ids of the lines."""
        self.failed = 0
        """Lines of requests that failed."""
        self._recover()

    def _recover(self) -> None:
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break  # torn: its request is computed again
            try:
                self._count(json.loads(line))
            except (ValueError, KeyError, TypeError):
                self._file.close()
                raise StartupError(
                    f"{self._path}:{number}: not a result of a batch; give another output file"
                ) from None
            end += len(line)
        self._file.truncate(end)
        os.fsync(self._file.fileno())

    def _count(self, result: dict[str, Any]) -> None:
        self.done.add(str(result["custom_id"]))
        self.failed += result["response"]["status_code"] != 200

    def append(self, results: Iterable[dict[str, Any]]) -> None:
        """Returns when the lines are on the disk."""
        results = list(results)
        text = memoryview(b"".join(json.dumps(result).encode() + b"\n" for result in results))
        while text:
            text = text[self._file.write(text) :]
        os.fsync(self._file.fileno())
        for result in results:
            self._count(result)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _sync_folder(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
