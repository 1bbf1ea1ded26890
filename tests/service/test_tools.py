"""`tandem batch`, `top` and `bench` against a real service, while things die."""

import contextlib
import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tandem import Client
from tests.patience import PATIENCE_S
from tests.service.tandem_process import Tandem, running

LINES = 120


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tandem]:
    log = tmp_path_factory.mktemp("tools") / "log"
    with running(log, "--dtype", "float64", "--kv-cache-memory", "64", "--max-num-seqs", "8") as service:
        yield service


def tandem(service: Tandem, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tandem", *arguments, "--endpoint", service.endpoint]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def write_requests(file: Path) -> None:
    """Chats and texts, sampled with seeds: their answers are known."""
    with file.open("w") as lines:
        for number in range(LINES):
            body: dict[str, object] = {"temperature": 0.8, "seed": number, "max_tokens": 12}
            prompt = f"It is a truth number {number}"
            if number % 2:
                line = {"url": "/v1/completions", "body": {**body, "prompt": prompt}}
            else:
                line = {
                    "url": "/v1/chat/completions", "body": {**body, "messages": [{"role": "user", "content": prompt}]}
                }  # fmt: skip
            lines.write(json.dumps({"custom_id": f"r{number}", "method": "POST", **line}) + "\n")


def answers(file: Path) -> dict[str, Any]:
    """The choices of every request, which has one line."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines), "a request has two lines"
    return {line["custom_id"]: line["response"]["body"]["choices"] for line in lines}


def whole_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_a_batch_killed_again_and_again_loses_and_doubles_nothing(service: Tandem, tmp_path: Path) -> None:
    """Also while the core dies, and by Ctrl-C. Each leaves a torn line behind, as a machine that dies would."""
    write_requests(tmp_path / "in")
    whole = tandem(service, "batch", str(tmp_path / "in"), str(tmp_path / "undisturbed"))
    assert whole.wait(PATIENCE_S) == 0, whole.communicate()
    arguments = ["batch", str(tmp_path / "in"), str(tmp_path / "out"), "--max-concurrency", "8"]
    rng = random.Random(5)
    for death in range(3):
        victim = tandem(service, *arguments)
        enough = whole_lines(tmp_path / "out") + rng.randrange(5, 25)
        while whole_lines(tmp_path / "out") < enough:
            assert victim.poll() is None, victim.communicate()
            time.sleep(0.005)
        if death == 1:
            service.processes("core")[0].kill()
        victim.send_signal(signal.SIGINT if death == 2 else signal.SIGKILL)
        _, told = victim.communicate(timeout=PATIENCE_S)
        if death == 2:
            assert victim.returncode == 1 and re.search(r"^tandem: stopped; \d+ of 120 requests are left", told, re.M)
        with (tmp_path / "out").open("a") as out:
            out.write('{"id": "batch_req_torn", "custom_id": "r1')
    assert whole_lines(tmp_path / "out") < LINES, "the runs were too short to disturb"
    last = tandem(service, *arguments)
    _, told = last.communicate(timeout=PATIENCE_S)
    assert last.returncode == 0 and f"{LINES}/{LINES}" in told, told
    assert answers(tmp_path / "out") == answers(tmp_path / "undisturbed")


def test_a_batch_calls_tools(service: Tandem, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"days": {"type": "integer", "maximum": 9, "minimum": 0}}}
    schema |= {"required": ["days"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("stay", "leave")]
    body = {"messages": [{"role": "user", "content": "Stay!"}], "tools": tools, "parallel_tool_calls": False}
    choices = {"any": "required", "named": {"type": "function", "function": {"name": "leave"}}}
    with (tmp_path / "in").open("w") as lines:
        for name, choice in choices.items():
            line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions"}
            lines.write(json.dumps({**line, "body": {**body, "tool_choice": choice, "seed": 1}}) + "\n")
    batch = tandem(service, "batch", str(tmp_path / "in"), str(tmp_path / "out"))
    assert batch.wait(PATIENCE_S) == 0, batch.communicate()
    for name, (choice,) in answers(tmp_path / "out").items():
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        assert call["function"]["name"] in (["leave"] if name == "named" else ["stay", "leave"])
        jsonschema.validate(json.loads(call["function"]["arguments"]), schema)


def test_top_tells_what_happened(service: Tandem) -> None:
    with Client(service.endpoint) as client:
        before = client.stats()
        completion = client.complete("It is a truth", max_tokens=20, ignore_eos=True, cache_salt="mine")
        after = client.stats(max_requests=1)
    prompt = completion.samples[0].usage.prompt_tokens
    assert after.prompt_tokens - before.prompt_tokens == prompt
    assert after.generation_tokens - before.generation_tokens == 20
    assert after.requests == before.requests + 1 and before.latest == ()
    (latest,) = after.latest
    assert (latest.request_id, latest.outcome) == (completion.request_id, "length")
    assert (latest.prompt_tokens, latest.cached_tokens, latest.completion_tokens) == (prompt, 0, 20)
    assert latest.age_s < 5
    shown, _ = tandem(service, "top", "--once", "--interval", "0.1").communicate(timeout=PATIENCE_S)
    assert "tiny (Qwen3ForCausalLM, float64)" in shown and completion.request_id[:8] in shown
    assert re.search(r"running +0 of 8", shown)


def test_top_is_live_until_ctrl_c(service: Tandem) -> None:
    """On a terminal, whose screen it gives back."""
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "tandem", "top", "--interval", "0.1", "--endpoint", service.endpoint]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    top = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment)
    os.close(end)
    shown = b""
    while shown.count(b"tokens/s") < 6:
        shown += os.read(terminal, 65536)
    top.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # the other end is closed
        while more := os.read(terminal, 65536):
            shown += more
    assert top.wait(PATIENCE_S) == 0 and b"Traceback" not in shown
    assert b"\x1b[?1049h" in shown and shown.rindex(b"\x1b[?1049l") > shown.rindex(b"tokens/s")
    os.close(terminal)


def test_bench_measures_any_service(service: Tandem, tmp_path: Path) -> None:
    points, plot = tmp_path / "points.json", tmp_path / "plot.png"
    arguments = [
        "--num-prompts",
        "6",
        "--input-len",
        "20",
        "--output-len",
        "10",
        "--max-concurrency",
        "2",
        "--clients",
        "1",
    ]
    rates = ["--request-rate", "50", "--json", str(points), "--plot", str(plot)]
    bench = tandem(service, "bench", *arguments, *rates)
    shown, told = bench.communicate(timeout=PATIENCE_S)
    assert bench.returncode == 0, told
    assert "6, 50/s" in shown and "6/6" in told
    for point in json.loads(points.read_text()):
        assert point["failed"] == 0 and point["tokens_per_second"] > 0
        assert point["prompt_tokens_per_second"] == pytest.approx(2 * point["tokens_per_second"], rel=0.1)
        assert 0 < point["ttft_p50_ms"] <= point["ttft_p99_ms"] and point["tpot_ms"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")
