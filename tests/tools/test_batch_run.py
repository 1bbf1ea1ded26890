"""A whole batch against a real frontend: bounded, patient with a full queue, and never two lines for one request."""

import json
import threading
import time
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from shared.errors import PermissionDenied, QueueFull, StartupError, Unauthenticated, Unavailable
from shared.pb import core_pb2
from tandem.batch import command
from tandem.batch.config import BatchConfig
from tests.client.conftest import Server
from tests.frontend.fake_core import Answer, failed, ids, length


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def write(file: Path, prompts: list[Any]) -> None:
    lines = [
        {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}}
        for number, prompt in enumerate(prompts)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def results(file: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines), "doubled"
    return {line["custom_id"]: line["response"] for line in lines}


def texts(file: Path) -> dict[str, str]:
    return {name: answer["body"]["choices"][0]["text"] for name, answer in results(file).items()}


def test_every_request_gets_its_own_answer(server: Server, files: tuple[Path, Path], tokenizer: Tokenizer) -> None:
    """Also where one request fails, and where one has several prompts."""
    server.answer = lambda submit: (ids(submit.prompt), length())
    write(files[0], [*(f"fox{number}" for number in range(40)), "", ["The", "sea"], [1 << 40]])
    problem = command.run(server.endpoint, *files, BatchConfig(max_concurrency=7))
    assert problem == f"2 of 43 requests failed: see status_code in {files[1]}"
    answers = results(files[1])
    assert len(answers) == 43
    for number in range(40):
        assert answers[f"r{number}"]["body"]["choices"][0]["text"] == f"fox{number}"
    assert [choice["text"] for choice in answers["r41"]["body"]["choices"]] == ["The", "sea"]
    for name, field in (("r40", "prompt"), ("r42", "prompt")):
        assert answers[name]["status_code"] == 400 and answers[name]["body"]["error"]["param"] == field


def test_what_has_a_line_is_not_computed_again(server: Server, files: tuple[Path, Path]) -> None:
    server.answer = lambda submit: (ids(submit.prompt), length())
    write(files[0], ["a", "b", "c"])
    assert command.run(server.endpoint, *files, BatchConfig()) is None
    kept, *_ = whole = files[1].read_text().splitlines(keepends=True)
    files[1].write_text(kept + whole[1][:-20])
    assert command.run(server.endpoint, *files, BatchConfig()) is None
    assert len(server.core.submits) == 5 and len(results(files[1])) == 3
    assert files[1].read_text().startswith(kept)
    assert command.run(server.endpoint, *files, BatchConfig()) is None
    assert len(server.core.submits) == 5


def test_so_many_at_a_time_and_no_more(server: Server, files: tuple[Path, Path]) -> None:
    write(files[0], ["a"] * 12)
    running = threading.Thread(target=command.run, args=(server.endpoint, *files, BatchConfig(max_concurrency=3)))
    running.start()
    for done in range(12):
        while len(server.core.submits) <= done:
            time.sleep(0.002)
        assert len(server.core.submits) <= done + 3
        server.give(server.core.submits[done], [7], length())
    running.join(10)
    assert len(results(files[1])) == 12


def test_a_full_queue_is_waited_for(server: Server, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "RETRY_S", 0.01)
    answers: dict[str, Answer] = {}

    def answer(submit: core_pb2.Submit) -> Answer:
        seen = str(ids(submit.prompt)) in answers
        answers[str(ids(submit.prompt))] = ((), None)
        return (ids(submit.prompt), length()) if seen else ((), failed(8, "full", 1))

    server.answer = answer
    write(files[0], ["fox", "sea"])
    assert command.run(server.endpoint, *files, BatchConfig()) is None
    assert texts(files[1]) == {"r0": "fox", "r1": "sea"}


@pytest.mark.parametrize(
    ("failures", "kind"),
    [
        ([failed(14, "no worker")], Unavailable),
        ([failed(14, "no worker"), failed(8, "full after the loss", 1)], QueueFull),
        ([failed(16, "no such token")], Unauthenticated),
        ([failed(7, "not for you")], PermissionDenied),
    ],
)
def test_a_service_that_stays_away_ends_the_run_and_not_the_batch(
    failures: list[core_pb2.Ended],
    kind: type[Exception],
    server: Server,
    files: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No line says that a request failed which was never computed."""
    for name in ("RETRY_S", "PATIENCE_S"):
        monkeypatch.setattr(command, name, 0.05)
    fails = chain(failures, repeat(failures[-1]))
    server.answer = lambda submit: ((), next(fails)) if len(server.core.submits) > 2 else ([7], length())
    write(files[0], ["a"] * 9)
    with pytest.raises(kind, match=r"; 7 of 9 requests are left: run the same again"):
        command.run(server.endpoint, *files, BatchConfig(max_concurrency=1))
    assert len(results(files[1])) == 2
    server.answer = lambda submit: ([7], length())
    assert command.run(server.endpoint, *files, BatchConfig()) is None
    assert len(results(files[1])) == 9


def test_a_late_request_is_a_line(server: Server, files: tuple[Path, Path]) -> None:
    write(files[0], ["a"])
    assert command.run(server.endpoint, *files, BatchConfig(timeout=0.1)) is not None
    assert results(files[1])["r0"]["status_code"] == 504


def test_the_output_of_another_batch_is_refused(server: Server, files: tuple[Path, Path]) -> None:
    server.answer = lambda submit: ([7], length())
    write(files[0], ["a", "b"])
    command.run(server.endpoint, *files, BatchConfig())
    write(files[0], ["a"])
    with pytest.raises(StartupError, match="'r1'"):
        command.run(server.endpoint, *files, BatchConfig())


def test_a_full_disk_ends_the_run(server: Server, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    server.answer = lambda submit: ([7], length())
    write(files[0], ["a"] * 5)

    def full(results: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command.Journal, "append", lambda self, results: full(results))
    with pytest.raises(OSError, match="No space left"):
        command.run(server.endpoint, *files, BatchConfig())
