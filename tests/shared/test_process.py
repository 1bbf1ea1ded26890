"""Children never outlive their parent, are stopped politely first, and are started again when they end."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared.process import STARTUP_FAILED, Supervisor, stop
from tests.patience import PATIENCE_S

POLITE = "import time; time.sleep(60)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"


def python(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)


def test_stop_kills_only_who_does_not_listen() -> None:
    polite, deaf = python(POLITE), python(DEAF)
    assert deaf.stdout is not None and deaf.stdout.readline() == b"deaf\n"
    asyncio.run(stop([polite, deaf], grace_s=0.3))
    assert (polite.returncode, deaf.returncode) == (-signal.SIGTERM, -signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a module that children can run by its name."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.getcwd()]))

    def write(name: str, code: str) -> str:
        (tmp_path / f"{name}.py").write_text(code)
        return name

    return write


def test_a_child_dies_with_its_killed_parent(module) -> None:
    child = module(
        "child", "from shared.process import die_with_parent\ndie_with_parent()\nimport time\ntime.sleep(60)"
    )
    parent = python(
        f"from shared.process import spawn; import time; print(spawn({child!r}, []).pid, flush=True); time.sleep(60)"
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.5)
    assert is_alive(pid)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + PATIENCE_S
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(pid)


async def nothing_to_wait_for() -> None:
    await asyncio.sleep(0)


def test_a_child_that_ends_is_started_again(module, tmp_path: Path) -> None:
    log = tmp_path / "starts"
    name = module("brief", f"open({str(log)!r}, 'a').write('x')")

    async def scenario() -> None:
        family = Supervisor()
        family.start("brief", name, [])
        while not log.exists() or len(log.read_text()) < 3:
            await asyncio.sleep(0.02)
        await family.stop(["brief"], 1.0, asyncio.Event())

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_a_child_that_cannot_start_ends_the_family(module, capsys: pytest.CaptureFixture[str]) -> None:
    name = module("misconfigured", f"import sys; sys.exit({STARTUP_FAILED})")

    async def scenario() -> bool:
        family = Supervisor()
        family.start("misconfigured", name, [])
        return await family.run(asyncio.Event(), asyncio.sleep(60), "ready")

    assert asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert capsys.readouterr().out == ""


def test_a_child_that_keeps_ending_before_ready_ends_the_family(module, tmp_path: Path) -> None:
    log = tmp_path / "starts"
    name = module("broken", f"open({str(log)!r}, 'a').write('x'); raise RuntimeError")

    async def scenario() -> bool:
        family = Supervisor()
        family.start("broken", name, [])
        return await family.run(asyncio.Event(), asyncio.sleep(60), "ready")

    assert asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert log.read_text() == "xxxxx"


def test_after_ready_even_that_child_is_started_again(module, tmp_path: Path) -> None:
    """A port that is not free yet must not end a service that ran for days."""
    log = tmp_path / "starts"
    name = module("late", f"import sys; open({str(log)!r}, 'a').write('x'); sys.exit({STARTUP_FAILED})")

    async def scenario() -> bool:
        family, stopped = Supervisor(), asyncio.Event()
        family.start("late", name, [])
        running = asyncio.create_task(family.run(stopped, nothing_to_wait_for(), "ready"))
        while not log.exists() or len(log.read_text()) < 2:
            await asyncio.sleep(0.02)
        stopped.set()
        failed = await running
        await family.stop(["late"], 1.0, asyncio.Event())
        return failed

    assert not asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
