"""docs/observe.md: its commands run as they stand, on other ports."""

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shared.ports import find_free
from tests.patience import PATIENCE_S
from tests.service.scrape import scrape
from tests.service.tandem_process import running

PAGE = (Path(__file__).parents[2] / "docs" / "observe.md").read_text()


def commands() -> list[str]:
    """Of the first example, without comments."""
    block = re.search(r"```\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    return [line.partition("#")[0].strip() for line in block[1].splitlines()]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed: apt-get install curl")
def test_the_first_example(tmp_path: Path) -> None:
    serve, *asks, _ = commands()
    port = find_free("127.0.0.1")
    assert serve.startswith("tandem serve ") and len(asks) == 2
    arguments = serve.replace("9100", str(port)).split()[2:]
    with running(tmp_path / "log", *arguments, "--kv-cache-memory", "64"):
        while not scrape(port).samples:
            pass
        for ask in asks:
            ask = ask.replace("9100", str(port)).replace("9101", str(port + 1))
            answer = subprocess.run(ask, shell=True, check=True, capture_output=True, text=True)
            assert "tandem_" in answer.stdout


@pytest.mark.parametrize("taken", ["scheduler", "worker"])
def test_a_metrics_port_that_is_taken_is_one_line(tmp_path: Path, taken: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        command = [sys.executable, "-m", "tandem", taken, "--model", "tiny", "--metrics-port", port]
        command += ["--port", str(find_free("127.0.0.1"))] + ["--workers", "127.0.0.1:1"] * (taken == "scheduler")
        result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert result.returncode and "--metrics-port" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
