"""A link that swallows packets without a word is noticed by the messages that do not come, and costs nobody a token.

Real network namespaces, where they are allowed: elsewhere `bench.soak` stalls a proxy.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.black_hole import CASES


def why_not() -> str:
    """Why no network namespace can be had here; empty where one can."""
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "no access to /dev/net/tun"
    tried = subprocess.run(
        ["unshare", "--net", "ip", "tuntap", "add", "tun0", "mode", "tun"], capture_output=True, text=True
    )
    return f"namespaces are not allowed: {tried.stderr.strip()}" if tried.returncode else ""


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_black_hole_between_scheduler_and_worker_loses_nothing(tmp_path: Path) -> None:
    command = ["unshare", "--net", sys.executable, "-m", "tests.service.black_hole", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found.keys() == {*CASES, "slow and lossy"}
    assert all(same for case in found.values() for same in case["same"]), found
