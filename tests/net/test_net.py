"""Streams go on whatever the network does, and while all parts of a service are replaced, as in a cluster.

Real network namespaces, where they are allowed: elsewhere `bench.soak` stalls a proxy.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def why_not() -> str:
    """Why no network namespace can be had here; empty where one can."""
    missing = [name for name in ("unshare", "nsenter", "ip", "mount") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "no access to /dev/net/tun"
    making = "ip tuntap add tun0 mode tun && mount --bind /dev/null /etc/hosts"
    tried = subprocess.run(["unshare", "--net", "--mount", "sh", "-ec", making], capture_output=True, text=True)
    return f"namespaces are not allowed: {tried.stderr.strip()}" if tried.returncode else ""


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_streams_go_on_whatever_the_network_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["unshare", "--net", sys.executable, "-m", "tests.net", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    *table, found = ended.stdout.splitlines()
    with capsys.disabled():
        print("", *table, sep="\n")
    found = json.loads(found)
    assert found["wrong"] == [] and found["requests"] > found["faults"] == 8, found
