"""Folders for sockets and shared files of running processes, gone when their process is, by whatever cause.

Who is killed can't remove its folder, so the next one does: a folder is locked by its process, and the kernel lets go
of the lock when that process ends, whatever becomes of process ids or containers that share the parent folder.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = ".tandem-"
"""Of what only this module makes: whatever of that name nobody has locked is removed. Short, since the path of a Unix
socket may have 107 bytes."""


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A private folder in the one for temporary files, after removing what killed processes of this user have left."""
    _reap(Path(tempfile.gettempdir()))
    folder, lock = _locked_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder() -> tuple[Path, int]:
    """Again where another process took the folder for a dead one's before it was locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _reap(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # no folder, locked, not ours, or gone meanwhile
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(lock)
