"""`tandem drain` before what is no worker that can be drained: one line on the terminal, and nothing of gRPC's own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from tests.security.authority import Authority


@contextmanager
def no_worker(credentials: grpc.ServerCredentials | None = None) -> Iterator[str]:
    """A server of something else, a scheduler for instance; its address."""
    server = grpc.server(ThreadPoolExecutor(1))
    where = "127.0.0.1:0"
    port = server.add_secure_port(where, credentials) if credentials else server.add_insecure_port(where)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def told(*arguments: str) -> str:
    """The one line that a drain leaves which fails."""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    command = [sys.executable, "-m", "tandem", "drain", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 1 and not result.stdout
    (line,) = result.stderr.splitlines()
    return line


def test_a_scheduler_is_no_worker() -> None:
    with no_worker() as endpoint:
        assert told(endpoint) == f"tandem: {endpoint}: this is no worker: give an address of the scheduler's --workers"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.mark.parametrize(
    ("trusted", "hint"),
    [
        (None, "speaks TLS (--tls-ca)"),
        ("another", "not signed by an authority of --tls-ca"),
        ("authority", "does it want a certificate (--tls-cert, --tls-key)?"),
    ],
)
def test_a_handshake_that_fails_is_told_in_one_line(authority: Authority, trusted: str | None, hint: str) -> None:
    Authority(authority.folder, "another")
    certificate, key = authority.sign("server")
    pair = (key.read_bytes(), certificate.read_bytes())
    credentials = grpc.ssl_server_credentials([pair], authority.file.read_bytes(), require_client_auth=True)
    with no_worker(credentials) as endpoint:
        assert hint in told(endpoint, *(["--tls-ca", str(authority.folder / f"{trusted}.pem")] if trusted else []))
