"""The example of docs/security.md, from the authority to the first answer, as it stands but for its ports; and the same
in one command."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from shared.ports import find_free
from shared.security import ClientSecurity
from tandem import Client
from tests.patience import PATIENCE_S
from tests.security.authority import Authority
from tests.service.tandem_process import running
from tests.service.test_docs import DOCS, ROOT, blocks

PORTS = ("50051", "50052")


def test_the_page_leads_to_a_secured_service(tmp_path: Path) -> None:
    free = {port: str(find_free("127.0.0.1")) for port in PORTS}
    page = DOCS / "security.md"
    setting_up, serving, calling = blocks(page, "sh")
    (program,) = blocks(page, "python")
    (tmp_path / "tandem").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tandem "$@"\n')
    (tmp_path / "tandem").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(tmp_path), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "TANDEM_ENDPOINT": f"127.0.0.1:{free[PORTS[0]]}",
    }

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=PATIENCE_S
        )

    made = run("bash", "-euo", "pipefail", "-c", setting_up)
    assert made.returncode == 0, made.stderr
    started = []
    try:
        with (tmp_path / "log").open("w") as log:
            for line in serving.splitlines():
                for port, other in free.items():
                    line = line.replace(port, other)
                words = [sys.executable, "-m", *shlex.split(line)]
                started.append(
                    subprocess.Popen(
                        words, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=tmp_path
                    )
                )
                assert started[-1].stdout is not None
                assert "ready" in started[-1].stdout.readline(), (tmp_path / "log").read_text()
        called = run("bash", "-euo", "pipefail", "-c", calling)
        assert called.returncode == 0, called.stderr
        asked = run(sys.executable, "-c", program.replace(PORTS[0], free[PORTS[0]]))
        assert asked.returncode == 0 and asked.stdout.strip(), asked.stderr
        refused = run("tandem", "generate", "Once", "--tls-ca", "ca.pem")
        assert refused.returncode == 1 and "a token is needed" in refused.stderr
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(timeout=PATIENCE_S)


def test_one_command_serves_in_tls_too(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.sign("server")
    (tmp_path / "token").write_text("a-token-of-tests")
    mutual = ["--tls-cert", str(certificate), "--tls-key", str(key), "--tls-client-ca", str(authority.file)]
    with running(
        tmp_path / "log", *mutual, "--token-file", str(tmp_path / "token"), "--kv-cache-memory", "64"
    ) as served:
        own = dict(zip(("tls_cert", "tls_key"), authority.sign("client", "client.example"), strict=True))
        security = ClientSecurity(tls_ca=authority.file, token_file=tmp_path / "token", **own)
        with Client(served.endpoint, security=security) as client:
            assert client.complete("Once", max_tokens=2).text
