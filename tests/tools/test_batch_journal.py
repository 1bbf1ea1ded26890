"""A batch's output: whatever is cut off where, the lines before it stay, and no other run writes beside."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.errors import StartupError
from tandem.batch.journal import Journal


def result(custom_id: str, status: int = 200) -> dict[str, object]:
    return {"custom_id": custom_id, "response": {"status_code": status, "body": {"text": "ü\n\u2028"}}}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(names=st.lists(st.text(max_size=5), unique=True, max_size=6), cut=st.integers(0, 600))
def test_a_torn_last_line_is_cut_off_and_the_rest_stays(tmp_path: Path, names: list[str], cut: int) -> None:
    path = tmp_path / "out.jsonl"
    path.unlink(missing_ok=True)
    with Journal(path) as journal:
        journal.append(result(name) for name in names)
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    kept = whole[:cut].count(b"\n")
    with Journal(path) as journal:
        assert journal.done == set(names[:kept])
        journal.append(result(name) for name in names[kept:])
    assert path.read_bytes() == whole
    assert [json.loads(line)["custom_id"] for line in whole.splitlines()] == names


def test_an_id_with_half_a_character_stays_what_it_is(tmp_path: Path) -> None:
    """JSON can hold it, UTF-8 can't."""
    with Journal(tmp_path / "out") as journal:
        journal.append([result("\ud83d")])
    with Journal(tmp_path / "out") as journal:
        assert journal.done == {"\ud83d"}


def test_failed_requests_are_counted_over_all_runs(tmp_path: Path) -> None:
    with Journal(tmp_path / "out") as journal:
        journal.append([result("a"), result("b", 400)])
    with Journal(tmp_path / "out") as journal:
        journal.append([result("c", 500)])
        assert (journal.done, journal.failed) == ({"a", "b", "c"}, 2)


def test_a_second_run_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    with Journal(tmp_path / "out"):
        code = "import pathlib, sys; from tandem.batch.journal import Journal; Journal(pathlib.Path(sys.argv[1]))"
        command = [sys.executable, "-c", code, str(tmp_path / "out")]
        second = subprocess.run(command, capture_output=True, text=True)
        assert second.returncode and "another `tandem batch`" in second.stderr
    with Journal(tmp_path / "out"):
        pass


@pytest.mark.parametrize("content", ["precious\n", '{"a": 1}\n', "[]\n", '{"custom_id": "a", "response": 3}\n'])
def test_a_file_of_something_else_is_refused_and_stays(tmp_path: Path, content: str) -> None:
    (tmp_path / "out").write_text(content)
    with pytest.raises(StartupError, match="out:1: not a result"):
        Journal(tmp_path / "out")
    assert (tmp_path / "out").read_text() == content


def test_lines_are_on_the_disk_when_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the file's own name."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    with Journal(tmp_path / "out") as journal:
        assert str(tmp_path) in synced
        synced.clear()
        journal.append([result("a")])
        assert synced == [str(tmp_path / "out")] and (tmp_path / "out").read_text().endswith("\n")
