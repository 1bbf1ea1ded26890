"""What a killed process leaves is removed by the next one, and what a live one has is not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.scratch import scratch_folder

HOLDER = """
from shared.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "core.sock").touch()
    print(folder, flush=True)
    input()
"""


def hold(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that holds a scratch folder, and the folder."""
    environment = {**os.environ, "TMPDIR": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_killed_process_s_folder_goes_with_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "tandem-worker-notes").mkdir()
    killed, left = hold(tmp_path)
    alive, kept = hold(tmp_path)
    try:
        killed.kill()
        killed.wait()
        assert left.exists()
        with scratch_folder() as own:
            assert not left.exists() and (kept / "core.sock").exists() and own.stat().st_mode & 0o077 == 0
        assert not own.exists()
    finally:
        alive.communicate("\n")
    assert not kept.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["tandem-worker-notes"]
