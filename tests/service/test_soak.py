"""Three minutes of a soak: mixed work of few clients, and faults of all kinds. `make soak` asks for more."""

import json
import re
import subprocess
import sys
from pathlib import Path

from bench.soak.faults import FAULTS, schedule
from bench.soak.work import kinds

SECONDS = 180
LOAD = ("--clients", "4", "--pause", "0.25", "--every", "5")
"""Other tests run beside it: it waits most of the time."""


def test_every_request_ends_once_as_in_the_undisturbed_run(tmp_path: Path) -> None:
    """And nothing is left: see bench.soak for what it counts as a problem."""
    command = [sys.executable, "-m", "bench.soak", "--seconds", str(SECONDS), "--json", str(tmp_path / "report")]
    ended = subprocess.run([*command, *LOAD], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"^\d:\d\d/\d:\d\d .* requests, .* faults, last .* lost 0, wrong 0$", ended.stderr, re.MULTILINE)
    report = json.loads((tmp_path / "report").read_text())
    assert report["problems"] == []
    assert report["tally"]["ends"].keys() <= {"complete", "aborted", "left", "late"}
    assert report["tally"]["kinds"].keys() == {kind.name for kind in kinds()}
    struck = {fault["name"] for fault in report["faults"]}
    assert len(struck) > 0.8 * len(FAULTS), "one that finds nothing to strike is left out"


def test_a_schedule_follows_from_its_seed_and_has_every_fault_before_any_comes_again() -> None:
    faults = list(schedule(1, 1000.0, 3.0))
    assert faults == list(schedule(1, 1000.0, 3.0)) != list(schedule(2, 1000.0, 3.0))
    assert {fault.name for fault in faults[: len(FAULTS)]} == FAULTS.keys()
    assert all(fault.name.startswith("link") for fault in faults if fault.at_s >= 800.0)
