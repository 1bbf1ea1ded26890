"""A batch's input: checked as a whole, with the numbers of the lines that are wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import StartupError
from tandem.batch.request_lines import RequestLine, custom_ids, requests


def line(custom_id: Any = "a", **changes: Any) -> str:
    whole = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}, **changes}
    return json.dumps(whole)


def written(path: Path, *lines: str) -> Path:
    (path / "in.jsonl").write_text("\n".join(lines))
    return path / "in.jsonl"


def test_every_line_is_a_request(tmp_path: Path) -> None:
    """Blank lines and a missing last line feed are no mistakes."""
    file = written(
        tmp_path, line("a"), "", line("b", url="/v1/chat/completions", body={"messages": []}), "  ", line("ü")
    )
    assert custom_ids(file) == {"a", "b", "ü"}
    assert list(requests(file))[1] == RequestLine("b", "/v1/chat/completions", {"messages": []})


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("\udcff", "not JSON"),
        ("3", "not a JSON object"),
        (line(None), "custom_id"),
        (line(""), "custom_id"),
        (line(7), "custom_id"),
        (line("first"), "earlier line"),
        (line(method="GET"), "method must be POST"),
        (line(url="/v1/embeddings"), "/v1/chat/completions"),
        (line(url=["x"]), "/v1/chat/completions"),
        (line(body="x"), "body"),
    ],
)
def test_a_bad_line_is_told_with_its_number(tmp_path: Path, bad: str, why: str) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(f"{line('first')}\n\n{bad}\n{line('last')}".encode("utf-8", "surrogateescape"))
    with pytest.raises(StartupError, match=why) as error:
        custom_ids(file)
    assert f"{file}:3: " in str(error.value) and "nothing was computed" in str(error.value)


def test_many_bad_lines_are_told_in_part(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"in.jsonl:5: .* \(and 95 more\)") as error:
        custom_ids(written(tmp_path, *["{"] * 100))
    assert "\n" not in str(error.value)
