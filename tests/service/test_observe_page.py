"""docs/observe.md: its commands run as they stand, on other ports."""

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shared.ports import find_free
from tandem import Client
from tests.patience import PATIENCE_S
from tests.service.collector import collecting
from tests.service.scrape import scrape
from tests.service.tandem_process import free_pair, running

PAGE = (Path(__file__).parents[2] / "docs" / "observe.md").read_text()


def commands() -> list[list[str]]:
    """Of each example, without comments."""
    blocks = re.findall(r"```\n(.*?)```", PAGE, re.DOTALL)
    return [[line.partition("#")[0].strip() for line in block.splitlines()] for block in blocks]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed: apt-get install curl")
def test_the_examples(tmp_path: Path) -> None:
    """One service has the flags of both."""
    (serve, *asks, _), (_, traced) = commands()
    port = free_pair()
    assert serve.startswith("tandem serve ") and traced.startswith("tandem serve ") and len(asks) == 2
    with collecting() as collector:
        arguments = [*serve.split()[2:], *traced.replace("http://127.0.0.1:4317", collector.endpoint).split()[4:]]
        arguments = [word.replace("9100", str(port)) for word in arguments]
        check(tmp_path / "log", arguments, port, asks)
    assert {"generate", "queue", "prefill", "decode"} == {span.name for span in collector.spans}


def check(log: Path, arguments: list[str], port: int, asks: list[str]) -> None:
    with running(log, *arguments, "--kv-cache-memory", "64") as service:
        with Client(service.endpoint) as client:
            client.complete("It is", max_tokens=2)
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
