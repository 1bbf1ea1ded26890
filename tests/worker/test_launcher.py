"""A worker group as an operator meets it: real processes, killed, stopped and misconfigured."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from grpc import StatusCode

from shared.pb import worker_pb2_grpc
from shared.rpc import make_channel
from shared.types import StepPlan
from shared.wire import plan_to_pb, result_from_pb
from tests.patience import PATIENCE_S
from tests.worker.model_folder import write_model
from worker_svc.environment import rank_environment

START = """
import json, sys
from shared.errors import TandemError
from worker_svc.config import WorkerConfig
from worker_svc.main import run
try:
    sys.exit(run(WorkerConfig(**json.loads(sys.argv[1]))))
except TandemError as error:
    sys.exit(f"tandem: {error}")
"""


class Group:
    """A launcher process and what it started."""

    def __init__(self, log: Path, model: Path, **settings: Any) -> None:
        self.log = log
        values = {"model": str(model), "port": 0, "dtype": "float64", "num_kv_blocks": 16, **settings}
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, json.dumps(values)], stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def wait_ready(self) -> str:
        """The ready line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.errors()
        return line

    def ranks(self) -> list[psutil.Process]:
        """By rank."""
        children = psutil.Process(self.process.pid).children()
        return sorted(children, key=lambda child: int(child.cmdline()[child.cmdline().index("--rank") + 1]))

    def errors(self) -> list[str]:
        """Lines on stderr that are no log entries."""
        return [line for line in self.log.read_text().splitlines() if line.strip() and not line.startswith("{")]

    def wait(self, timeout: float = PATIENCE_S) -> int:
        """Its exit status."""
        return self.process.wait(timeout)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def running(tmp_path: Path, model: Path, **settings: Any) -> Iterator[Group]:
    """A ready group; whatever the test does to it, no rank and no folder of it may remain."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        group = Group(tmp_path / "log", model, **settings)
    ranks: list[psutil.Process] = []
    try:
        group.line = group.wait_ready()  # type: ignore[attr-defined]
        ranks = group.ranks()
        yield group
        group.wait()
        _, alive = psutil.wait_procs(ranks, timeout=PATIENCE_S)
        assert not alive, f"left behind: {alive}"
        assert list(temporary.iterdir()) == []
    finally:
        for process in (*ranks, psutil.Process(group.process.pid) if group.process.poll() is None else None):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process is not None:
                    process.kill()
        group.process.wait()


def port_of(group: Any) -> int:
    found = re.match(r"tandem worker ready on 127\.0\.0\.1:(\d+) \(model ", group.line)
    assert found, group.line
    return int(found[1])


@pytest.mark.parametrize(("number", "size"), [(signal.SIGTERM, 2), (signal.SIGINT, 1)])
def test_a_signal_stops_all_ranks(tmp_path: Path, model: Path, number: signal.Signals, size: int) -> None:
    """Until then they listen on this machine alone; afterwards nobody does."""
    with running(tmp_path, model, tensor_parallel=size) as group:
        port = port_of(group)
        for rank in group.ranks():
            assert listens_on(rank) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        group.process.send_signal(number)
        assert group.wait() == 0
    assert group.errors() == []
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def listens_on(process: psutil.Process) -> set[str]:
    return {c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}


def test_a_group_refuses_a_plan_on_all_ranks_and_drains_until_its_scheduler_leaves(tmp_path: Path, model: Path) -> None:
    async def scheduler(group: Any) -> None:
        channel = make_channel(f"127.0.0.1:{port_of(group)}")
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        bad = stub.Execute(iter([plan_to_pb(StepPlan(1, 5), 7)]))
        assert await bad.code() is StatusCode.INVALID_ARGUMENT
        call = stub.Execute()
        draining, step_id = False, 0
        while not draining:
            step_id += 1
            await call.write(plan_to_pb(StepPlan(2, step_id), 7))
            draining = result_from_pb(await call.read()).draining
            if step_id == 1:
                group.process.send_signal(signal.SIGTERM)
        await call.write(plan_to_pb(StepPlan(2, step_id + 1), 7))
        assert result_from_pb(await call.read()).step_id == step_id + 1
        await call.done_writing()
        await channel.close()

    with running(tmp_path, model, tensor_parallel=2) as group:
        asyncio.run(asyncio.wait_for(scheduler(group), PATIENCE_S))
        assert group.wait() == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_group(tmp_path: Path, model: Path, rank: int) -> None:
    with running(tmp_path, model, tensor_parallel=2) as group:
        group.ranks()[rank].kill()
        assert group.wait() == 1
        (line,) = group.errors()
        assert f"rank {rank} was killed by SIGKILL" in line


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_noticed_though_idle(tmp_path: Path, model: Path, rank: int) -> None:
    with running(tmp_path, model, tensor_parallel=2, step_timeout=1.5) as group:
        group.ranks()[rank].send_signal(signal.SIGSTOP)
        assert group.wait() == 1
        (line,) = group.errors()
        assert f"rank {rank} has not turned" in line


def test_a_killed_launcher_takes_its_ranks_along(tmp_path: Path, model: Path) -> None:
    with running(tmp_path, model, tensor_parallel=2) as group:
        wait_until_warm(tmp_path / "tmp")
        group.process.kill()


def wait_until_warm(temporary: Path) -> None:
    """The group's folder is gone once no rank needs it any more."""
    deadline = time.monotonic() + PATIENCE_S
    while list(temporary.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ranks_keep_nvlink_multicast_off() -> None:
    """Whatever the launcher's own environment says: it can harm others on the host."""
    assert {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}.items() <= rank_environment().items()


STEPS = """
import ctypes, resource, sys
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
count, size = map(int, sys.argv[1:])
def step():
    tensors = [ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size))) for _ in range(count)]
    for tensor in tensors:
        ctypes.memset(tensor, 1, size)
    for tensor in tensors:
        libc.free(tensor)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
before = faults()
for _ in range(10):
    step()
print((faults() - before) / 10)
"""
"""Prints how many pages each of ten steps gets from the kernel."""


@pytest.mark.parametrize(("count", "kilobytes"), [(40, 100), (12, 1024), (6, 4096), (3, 16384)])
def test_ranks_keep_what_they_allocate_for_the_next_step(count: int, kilobytes: int) -> None:
    command = [sys.executable, "-c", STEPS, str(count), str(kilobytes << 10)]
    printed = subprocess.run(command, env={**os.environ, **rank_environment()}, stdout=subprocess.PIPE, check=True)
    assert float(printed.stdout) < 0.1 * count * kilobytes / 4


def test_an_operator_s_own_choice_of_what_ranks_keep_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "0")
    assert rank_environment()["MALLOC_TRIM_THRESHOLD_"] == "0"


def refused(log: Path, model: Path, **settings: Any) -> str:
    """The one line of a group that can't start."""
    group = Group(log, model, **settings)
    assert group.wait() not in (0, None)
    (line,) = group.errors()
    return line


def test_a_busy_port(tmp_path: Path, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"127.0.0.1:{port}" in refused(tmp_path / "log", model, port=port)


def test_a_missing_model(tmp_path: Path) -> None:
    assert "/nowhere" in refused(tmp_path / "log", Path("/nowhere"))


def test_an_architecture_that_is_not_served(tmp_path: Path, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["MistralForCausalLM"]}))
    assert "MistralForCausalLM" in refused(tmp_path / "log", tmp_path)


def test_what_a_rank_finds_is_told_once(tmp_path: Path, model: Path) -> None:
    """Both ranks find that there are no weights."""
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    assert "no safetensors file" in refused(tmp_path / "log", tmp_path, tensor_parallel=2)
