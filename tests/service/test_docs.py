"""The pages for people: every example runs as it stands, every flag is there with its default."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from typer.main import get_command

from shared.ports import find_free
from shared.security import ClientSecurity, ServerSecurity
from tandem.cli import app
from tandem.requests import GenerateOptions
from tests.patience import PATIENCE_S
from tests.service.tandem_process import Tandem, running

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SERVERS = ("tandem serve", "tandem worker", "tandem scheduler")
PORTS = ("50051", "50052")
SECURITY = {field.name for kind in (ServerSecurity, ClientSecurity) for field in fields(kind)}
SECURITY |= {"health_port", "worker_token_file", "peer_tls_ca"}
"""Flags that have a page of their own."""
OWN = {
    "serve": {"model", "workers", "host", "port", "metrics_port", "drain_timeout"},
    "openai": {"model", "http_host", "http_port", "http_metrics_port"},
}
"""Flags of commands that hand others on, which stand elsewhere."""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """In which `tandem` is this one."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "tandem").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tandem "$@"\n')
    (folder / "tandem").chmod(0o755)
    paths = os.pathsep.join([str(folder), os.environ["PATH"]])
    return {**os.environ, "PATH": paths, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tandem]:
    with running(tmp_path_factory.mktemp("docs") / "log", "--kv-cache-memory", "64") as service:
        yield service


PYTHON = [
    (page, index) for page in ("../README.md", "client.md") for index in range(len(blocks(DOCS / page, "python")))
]


@pytest.mark.parametrize(("page", "index"), PYTHON)
def test_python_examples_run(service: Tandem, environment: dict[str, str], page: str, index: int) -> None:
    code = blocks(DOCS / page, "python")[index].replace("127.0.0.1:50051", service.endpoint)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=PATIENCE_S
    )
    assert result.returncode == 0 and result.stdout.strip(), result.stderr


@pytest.mark.parametrize("page", ["batch.md", "measure.md", "serve.md"])
def test_shell_examples_run(service: Tandem, environment: dict[str, str], tmp_path: Path, page: str) -> None:
    """Those that don't serve themselves."""
    scripts = [script for script in blocks(DOCS / page, "sh") if not script.startswith(SERVERS)]
    assert scripts
    for script in scripts:
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            capture_output=True,
            text=True,
            env={**environment, "TANDEM_ENDPOINT": service.endpoint},
            cwd=tmp_path,
            timeout=PATIENCE_S,
        )
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("script", [script for script in blocks(DOCS / "serve.md", "sh") if script.startswith(SERVERS)])
def test_serving_examples_serve(environment: dict[str, str], tmp_path: Path, script: str) -> None:
    """Each line on its own, on free ports, until the last says that it is ready."""
    free = {port: str(find_free("127.0.0.1")) for port in PORTS}
    lines = [re.sub("|".join(PORTS), lambda match: free[match[0]], line) for line in script.splitlines()]
    if "--port" not in lines[0]:
        lines[0] += f" --port {free[PORTS[0]]}"
    started = []
    try:
        with (tmp_path / "log").open("w") as log:
            for line in lines:
                arguments = shlex.split(line.replace("tandem", f"{sys.executable} -m tandem", 1))
                started.append(
                    subprocess.Popen(
                        arguments, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=tmp_path
                    )
                )
        for process in started:
            assert process.stdout is not None
            assert "ready" in process.stdout.readline(), (tmp_path / "log").read_text()
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(timeout=PATIENCE_S)


def sections(page: str) -> dict[str, str]:
    """The tables of flags by their command."""
    parts = re.split(r"^## Flags(?: of `tandem (\w+)`)?$", (DOCS / page).read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize(
    ("page", "heading", "name"),
    [
        ("serve.md", "serve", "serve"),
        ("serve.md", "scheduler", "scheduler"),
        ("serve.md", "worker", "worker"),
        ("serve.md", "drain", "drain"),
        ("measure.md", "top", "top"),
        ("measure.md", "bench", "bench"),
        ("batch.md", None, "batch"),
        ("openai.md", "openai", "openai"),
    ],
)
def test_every_flag_has_its_row_and_default(page: str, heading: str | None, name: str) -> None:
    table = sections(page)[heading]  # type: ignore[index]
    rows = dict(re.findall(r"^\| `(--[\w-]+)` \| (.*?) \|", table, re.MULTILINE))
    for parameter in get_command(app).commands[name].params:  # type: ignore[attr-defined]
        if (
            parameter.param_type_name != "option"
            or parameter.name in {"help", *SECURITY}
            or parameter.name not in OWN.get(name, {parameter.name})
        ):
            continue
        told = rows.pop(parameter.opts[0])
        default = parameter.default
        words = {None: "required" if parameter.required else "unset", True: "on", False: "off"}
        expected = words[default] if default is None or isinstance(default, bool) else str(default).strip("[]")
        assert told.split(",")[0].strip("`") == expected, parameter.opts[0]
    assert not rows, "flags that do not exist"


@pytest.mark.parametrize("name", ["serve", "scheduler", "worker", "generate", "chat", "top", "bench", "batch", "drain"])
def test_flags_of_security_have_their_rows_and_no_defaults(name: str) -> None:
    rows = re.findall(r"^\| (`--.*?`) \| unset \|", (DOCS / "security.md").read_text(), re.MULTILINE)
    told = set(re.findall(r"--[\w-]+", " ".join(rows)))
    here = [p for p in get_command(app).commands[name].params if p.name in SECURITY]  # type: ignore[attr-defined]
    assert {parameter.opts[0] for parameter in here} <= told and all(parameter.default is None for parameter in here)
    assert {f"--{flag.replace('_', '-')}" for flag in SECURITY} == told


def test_every_option_of_the_client_has_its_row() -> None:
    names: set[str] = set()
    for page in ("client.md", "sampling.md", "constrain.md"):
        for first in re.findall(r"^\|(.*?)\|", (DOCS / page).read_text(), re.MULTILINE):
            names |= set(re.findall(r"`(\w+)=?[^`]*`", first))
    assert set(GenerateOptions.__annotations__) <= names
