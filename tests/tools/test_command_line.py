"""Help worth reading and a shell that completes: what a person meets before any service runs."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import cast
from unittest import mock

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from shared.errors import StartupError
from shared.ports import find_free
from shared.process import STARTUP_FAILED
from shared.security import ClientSecurity
from tandem import Unavailable, talk
from tandem.cli import app
from tandem.serve import ServeConfig, Service
from tests.client.conftest import Server
from tests.frontend.fake_core import failed
from worker_svc.config import WorkerConfig

COMMANDS = tuple(get_command(app).commands)  # type: ignore[attr-defined]
USING = ("generate", "chat", "top", "bench", "batch")


def tandem(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tandem", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env})


def help_of(*arguments: str) -> str:
    """At 80 columns."""
    return CliRunner().invoke(app, [*arguments, "--help"], prog_name="tandem", terminal_width=80).output


def test_commands_are_under_headings_with_examples() -> None:
    shown = help_of()
    run, use = shown.split("Run a service:")[1].split("Use a service that runs:")
    assert all(f"\n  {name} " in (use if name in USING else run) for name in COMMANDS)
    assert "Examples:\n" in use


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_told_whole_and_every_example_parses(name: str) -> None:
    """At 80 columns, too; an example with an option that does not exist misleads."""
    command = get_command(app).commands[name]  # type: ignore[attr-defined]
    shown = help_of(name)
    for parameter in command.params:
        for option in parameter.opts if parameter.param_type_name == "option" else ():
            assert re.search(rf"{re.escape(option)}(?![\w-])", shown), option
    examples = shown.split("Examples:\n")[1].splitlines()
    assert examples
    for example in examples:
        words = shlex.split(example.split("<")[0])
        assert words[:2] == ["tandem", name]
        command.make_context(name, words[2:])


def in_a_leader_worker_set(*words: str) -> WorkerConfig:
    """The settings of `tandem worker ...` there."""
    env = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "leader"}
    logging = mock.patch("tandem.cli.configure_logging")  # it would be of this process, to the runner's standard error
    with logging, mock.patch("worker_svc.main.run", return_value=0) as run:
        result = CliRunner().invoke(app, words, env=env)
    assert run.called, result.output
    (config,) = run.call_args.args
    return cast(WorkerConfig, config)


@pytest.mark.parametrize(
    ("flags", "nodes"),
    [([], (2, 1, "leader", 29500)), (["--node-rank", "0", "--master-addr", "10.0.0.2"], (2, 0, "10.0.0.2", 29500))],
)
def test_a_leader_worker_set_tells_a_worker_its_place_and_flags_win(
    flags: list[str], nodes: tuple[object, ...]
) -> None:
    config = in_a_leader_worker_set("worker", "--model", "tiny", *flags)
    assert (config.nnodes, config.node_rank, config.master_addr, config.master_port) == nodes


def test_workers_of_serve_are_whole_groups_wherever_they_run() -> None:
    with mock.patch("shared.process.Supervisor.start") as start:
        Service(ServeConfig(port=find_free("127.0.0.1")), "tiny")
    (_, _, words), _ = start.call_args_list[0]
    assert in_a_leader_worker_set(*words).nnodes == 1


def test_options_of_serve_are_grouped_by_process() -> None:
    shown = help_of("serve")
    own, scheduler, worker = re.split("The scheduler:|Each worker:", shown)
    assert "--port" in own and "--max-queue" in scheduler and "--tensor-parallel" in worker


@pytest.fixture
def on_path(tmp_path: Path) -> str:
    """A PATH on which `tandem` is this one."""
    script = tmp_path / "tandem"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tandem "$@"\n')
    script.chmod(0o755)
    return os.pathsep.join([str(tmp_path), os.environ["PATH"]])


OFFERED = {
    "tandem ": set(COMMANDS),
    "tandem ba": {"batch"},
    "tandem serve --max-n": {"--max-num-seqs", "--max-num-batched-tokens"},
    "tandem serve --model ": {"tiny", "tiny-moe"},
    "tandem bench --range": {"--range-ratio"},
}


def test_bash_completes(on_path: str) -> None:
    """By the script that `--show-completion` prints in a bash, as --install-completion would install it."""
    code = "source <(tandem --show-completion)\n"
    for typed in OFFERED:
        *before, last = typed.split(" ")
        code += f"COMP_WORDS=({shlex.join([*before, last])}); COMP_CWORD={len(before)}\n"
        code += "_tandem_completion tandem; echo ${COMPREPLY[@]}\n"
    environment = {**os.environ, "PATH": on_path}
    result = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True, env=environment)
    assert [set(line.split()) for line in result.stdout.splitlines()] == list(OFFERED.values()), result.stderr


@pytest.mark.parametrize(
    ("words", "named", "status"),
    [
        ("top", "tandem serve", 1),
        ("bench", "tandem serve", 1),
        ("batch IN OUT", "tandem serve", 1),
        ("drain 127.0.0.1:1", "is it one of the scheduler's --workers", 1),
        ("drain 127.0.0.1:1,127.0.0.1:2", "one worker at a time", STARTUP_FAILED),
        ("drain foo", "host:port", STARTUP_FAILED),
        ("generate hi --json-schema /nowhere/schema", "--json-schema /nowhere/schema: No such file", STARTUP_FAILED),
        ("generate hi --token-file /nowhere/token", "--token-file /nowhere/token: No such file", STARTUP_FAILED),
        ("drain 127.0.0.1:1 --timeout 0", "0.1 to 86400", STARTUP_FAILED),
        ("top --interval 0", "0.1 to 60", STARTUP_FAILED),
        ("bench --request-rate 0", "--request-rate", STARTUP_FAILED),
        ("bench --num-prompts 0", "--num-prompts", STARTUP_FAILED),
        ("batch IN OUT --max-concurrency 0", "--max-concurrency", STARTUP_FAILED),
        ("batch /nowhere/in OUT", "/nowhere/in", STARTUP_FAILED),
        ("batch IN /nowhere/out", "/nowhere/out", STARTUP_FAILED),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(tmp_path: Path, words: str, named: str, status: int) -> None:
    (tmp_path / "IN").write_text("")
    arguments = [str(tmp_path / word) if word in ("IN", "OUT") else word for word in words.split()]
    result = tandem(*arguments, TANDEM_ENDPOINT="127.0.0.1:1")
    assert result.returncode == status and not result.stdout
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("tandem:")]
    assert named in line and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("words", "flags", "port"),
    [
        ("scheduler --model tiny --workers a:1 --health-port 50051", "--port and --health-port", 50051),
        ("scheduler --model tiny --workers a:1 --port 5 --metrics-port 5", "--port and --metrics-port", 5),
        ("worker --model tiny --health-port 9 --metrics-port 9", "--health-port and --metrics-port", 9),
        ("worker --model tiny --nnodes 2 --master-addr a --port 29500", "--port and --master-port", 29500),
        ("serve --health-port 50051", "--port and --health-port", 50051),
        ("serve --workers 2 --metrics-port 50049", "--port and --metrics-port of worker 1", 50051),
        ("openai --http-metrics-port 8000", "--http-port and --http-metrics-port", 8000),
        ("openai --port 8000", "--http-port and --port", 8000),
    ],
)
def test_a_port_that_is_given_twice_is_told_with_both_flags(words: str, flags: str, port: int) -> None:
    with mock.patch("tandem.cli.configure_logging"):
        result = CliRunner().invoke(app, words.split())
    assert isinstance(result.exception, StartupError)
    assert str(result.exception) == f"{flags} are both {port}: give each a port of its own"


def test_a_group_of_one_node_does_not_listen_where_nodes_meet() -> None:
    assert WorkerConfig("model", port=29500).nnodes == 1


def test_who_met_a_server_is_not_told_to_start_one(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talk, "RESUME_TIMEOUT_S", 0.0)
    server.answer = lambda submit: ((), failed(14, "no worker for 60 s"))
    with pytest.raises(Unavailable) as told:
        talk.generate(server.endpoint, ClientSecurity(), "It is", as_json=False)
    assert str(told.value) == f"{server.endpoint}: no worker for 60 s"
