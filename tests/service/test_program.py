"""The command line as a person meets it: one ready line, one line per mistake, and nothing left behind."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shared.ports import find_free, require_free
from shared.process import STARTUP_FAILED
from tandem.models import model_folder
from tests.patience import PATIENCE_S
from tests.service.tandem_process import Tandem, running


def tandem(
    *arguments: str, stdin: str = "", timeout: float = PATIENCE_S, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tandem", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout, env=env)


def one_line(result: subprocess.CompletedProcess[str], *named: str) -> None:
    """A failure that says, in one line that names the cause, what is wrong."""
    assert result.returncode not in (0, None)
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, result.stderr
    for word in named:
        assert word in lines[0]
    assert "Traceback" not in result.stderr


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory):
    with running(tmp_path_factory.mktemp("program") / "log", "--kv-cache-memory", "64") as service:
        yield service


@pytest.mark.parametrize("command", ["serve", "worker", "scheduler"])
def test_a_missing_model(command: str) -> None:
    workers = ["--workers", "127.0.0.1:1"] if command == "scheduler" else []
    one_line(tandem(command, "--model", "/nowhere", *workers), "/nowhere")


def foreign_model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return str(tmp_path)


def test_a_model_that_the_worker_does_not_know(tmp_path: Path) -> None:
    one_line(tandem("worker", "--model", foreign_model(tmp_path)), "LlamaForCausalLM")


@pytest.mark.parametrize("command", ["serve", "worker", "scheduler"])
def test_a_busy_port(command: str) -> None:
    workers = ["--workers", "127.0.0.1:1"] if command == "scheduler" else []
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = str(server.getsockname()[1])
        one_line(tandem(command, "--model", "tiny", "--port", port, *workers), port)


@pytest.mark.parametrize(
    "command",
    [
        "serve --workers 0",
        "serve --port 70000",
        "serve --frontends 0",
        "serve --depth 5",
        "serve --block-size 0",
        "serve --step-timeout 0.5",
        "scheduler --model tiny --workers h",
        "scheduler --model tiny --workers h:1 --workers h:1",
        "scheduler --model tiny --workers h:1 --port 0",
    ],
)
def test_an_option_out_of_range(command: str) -> None:
    """Before any process is started: else several would say it, or one would wait for ever."""
    words = command.split()
    one_line(tandem(*words), words[-2])


def test_a_host_that_this_machine_does_not_have() -> None:
    one_line(tandem("serve", "--host", "192.0.2.1"), "192.0.2.1", "--host")


@pytest.mark.parametrize("command", ["serve", "worker", "demo"])
def test_no_torch(tmp_path: Path, command: str) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()]), "TANDEM_LOG_LEVEL": "ERROR"}
    if command == "demo":
        result = subprocess.run(
            [sys.executable, "-m", "tandem.demo"], capture_output=True, text=True, env=env, timeout=PATIENCE_S
        )
    else:
        result = tandem(command, "--model", "tiny", "--port", str(find_free("127.0.0.1")), env=env)
    one_line(result, "torch", "pip install")


def test_no_service_at_the_endpoint() -> None:
    one_line(tandem("generate", "hello", "--endpoint", "127.0.0.1:1"), "127.0.0.1:1")


def test_generate_streams_text(service: Tandem) -> None:
    result = tandem("generate", "It is a truth universally", "--endpoint", service.endpoint, "--max-tokens", "8")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert "8 tokens" in result.stderr


def test_generate_reads_standard_input_and_prints_json(service: Tandem) -> None:
    arguments = ["generate", "-", "--json", "--endpoint", service.endpoint, "--max-tokens", "8", "--temperature", "0"]
    result = tandem(*arguments, stdin="It is a truth universally")
    pieces = [json.loads(line) for line in result.stdout.splitlines()]
    assert sum(len(piece["token_ids"]) for piece in pieces) == 8
    plain = tandem("generate", "It is a truth universally", *arguments[3:])
    assert "".join(piece["text"] for piece in pieces) == plain.stdout.rstrip("\n")


def test_text_that_is_not_utf_8(service: Tandem) -> None:
    command = [sys.executable, "-m", "tandem", "generate", "-", "--endpoint", service.endpoint]
    result = subprocess.run(command, input=b"\xff\xfe", capture_output=True, timeout=PATIENCE_S)
    assert result.returncode == 1 and result.stderr.startswith(b"tandem: ") and result.stderr.count(b"\n") == 1


def test_chat_answers_each_turn(service: Tandem) -> None:
    result = tandem("chat", "--endpoint", service.endpoint, "--max-tokens", "16", stdin="Hello\nWho are you?\n")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("tokens/s") == 2


def test_a_mistake_in_a_request_is_one_line(service: Tandem) -> None:
    one_line(tandem("generate", "hello", "--endpoint", service.endpoint, "--max-tokens", "0"), "max_tokens")


def test_help_is_on_standard_output() -> None:
    result = tandem("serve", "--help")
    assert result.returncode == 0
    assert "Usage" in result.stdout


def test_the_scheduler_has_no_torch(service: Tandem) -> None:
    """Of the modules that the running processes mapped, none is torch's."""
    for role in ("core", "frontend"):
        for process in service.processes(role):
            assert not any("torch" in entry.path for entry in process.memory_maps()), role
    modules = "scheduler_svc.main, scheduler_svc.core_process, scheduler_svc.frontend.main, tandem.cli"
    code = f"import {modules}, sys; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_scheduler_and_a_worker_of_different_models(tmp_path: Path) -> None:
    """One line that names both, whichever is started first."""
    other = Path(shutil.copytree(model_folder("tiny"), tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    port = str(find_free("127.0.0.1"))
    command = [sys.executable, "-m", "tandem", "worker", "--model", str(other), "--port", port]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert worker.stdout is not None and worker.stdout.readline()
        arguments = ["--model", "tiny", "--workers", f"127.0.0.1:{port}", "--port", str(find_free("127.0.0.1"))]
        result = tandem("scheduler", *arguments, env={**os.environ, "TANDEM_LOG_LEVEL": "ERROR"})
        one_line(result, "other", "fingerprint")
    finally:
        worker.terminate()
        worker.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_process_and_no_socket(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C, an orchestrator, a terminal that is closed."""
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    service = Tandem(tmp_path / "log", "--kv-cache-memory", "64", TMPDIR=str(sockets))
    service.wait_ready()
    family = service.everyone()
    assert list(sockets.rglob("*.sock"))
    service.process.send_signal(number)
    assert service.process.wait(timeout=PATIENCE_S) == 0
    assert psutil.wait_procs(family, timeout=PATIENCE_S)[1] == []
    assert list(sockets.iterdir()) == []
    require_free("127.0.0.1", service.port)


def test_a_second_ctrl_c_waits_for_no_stream_and_leaves_nothing_either(tmp_path: Path) -> None:
    """Also on an IPv6 address."""
    files = tmp_path / "files"
    files.mkdir()
    arguments = ["--kv-cache-memory", "64", "--drain-timeout", str(10 * PATIENCE_S), "--host", "::1"]
    service = Tandem(tmp_path / "log", *arguments, TMPDIR=str(files))
    assert f"[::1]:{service.port}" in service.wait_ready()
    family = service.everyone()
    client = [sys.executable, "-m", "tandem", "generate", "It is", "--endpoint", f"[::1]:{service.port}", "--json"]
    with subprocess.Popen(client, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as generate:
        assert generate.stdout is not None
        generate.stdout.readline()
        service.processes("rank")[0].send_signal(signal.SIGSTOP)
        service.process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            service.process.wait(1)
        service.process.send_signal(signal.SIGINT)
        assert service.process.wait(PATIENCE_S) == 0
        _, told = generate.communicate(timeout=PATIENCE_S)  # it waits for another server first
        assert generate.returncode == 1 and told.startswith("tandem: "), told
    assert psutil.wait_procs(family, timeout=PATIENCE_S)[1] == []
    assert list(files.iterdir()) == []
    assert "Traceback" not in service.log.read_text()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["x", "--max-tokens", "-3"], "max_tokens"),
        (["x", "--max-tokens", str(1 << 64)], "max_tokens"),
        (["x", "--seed", "-1"], "seed"),
        (["x", "--seed", str(1 << 64)], "seed"),
        (["a\udcffb"], "text"),
    ],
)
def test_what_can_not_be_sent_is_one_line(arguments: list[str], named: str) -> None:
    one_line(tandem("generate", *arguments), named)


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_a_step_smaller_than_the_batch_is_one_line(command: str) -> None:
    arguments = ["--max-num-batched-tokens", "1", "--max-num-seqs", "64"]
    one_line(tandem(command, "--model", "tiny", *arguments), "--max-num-batched-tokens", "64")


def test_no_room_for_the_output_is_one_line(service: Tandem) -> None:
    command = [sys.executable, "-m", "tandem", "generate", "It is", "--endpoint", service.endpoint, "--max-tokens", "3"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S)
    one_line(result, "No space left")


def test_more_kv_memory_than_there_is_is_one_line() -> None:
    result = tandem("worker", "--model", "tiny", "--port", "0", "--kv-cache-memory", "100000000")
    assert result.returncode == STARTUP_FAILED
    assert "Traceback" not in result.stderr
    assert "--kv-cache-memory" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["d" * 100, "a,b"])
def test_a_folder_that_no_socket_can_be_in_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    one_line(
        tandem("scheduler", "--model", "tiny", "--workers", "127.0.0.1:1", "--port", str(find_free("127.0.0.1"))),
        "TMPDIR",
    )
    assert list(folder.iterdir()) == []
