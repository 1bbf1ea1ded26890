"""Reads a batch's input: one request a line, checked as a whole before anything is computed.

Knows the envelope of a line; what is in its body is tandem.batch.bodies' matter.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import StartupError

CHAT = "/v1/chat/completions"
URLS = (CHAT, "/v1/completions")

MOST_PROBLEMS = 5
"""Told of at a time."""


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One request."""

    custom_id: str
    url: str
    """One of URLS."""
    body: dict[str, Any]


def custom_ids(file: Path) -> set[str]:
    """The ids of all lines. Raises StartupError, naming the first bad lines, unless every line is a request."""
    ids: set[str] = set()
    problems = []
    for number, text in _lines(file):
        try:
            request = _parsed(text)
            if request.custom_id in ids:
                raise ValueError(f"custom_id {request.custom_id!r} is that of an earlier line")
            ids.add(request.custom_id)
        except ValueError as error:
            problems.append(f"{file}:{number}: {error}")
    if problems:
        more = f" (and {len(problems) - MOST_PROBLEMS} more)" if len(problems) > MOST_PROBLEMS else ""
        raise StartupError(f"nothing was computed; {'; '.join(problems[:MOST_PROBLEMS])}{more}")
    return ids


def requests(file: Path) -> Iterator[RequestLine]:
    """The requests of a file that custom_ids() accepted, one at a time: a large file need not fit into memory."""
    for _, text in _lines(file):
        yield _parsed(text)


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Number and content of each line that is not blank."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, line


def _parsed(text: bytes) -> RequestLine:
    """Raises ValueError."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(line, dict):
        raise ValueError("not a JSON object")
    custom_id, url, body = line.get("custom_id"), line.get("url"), line.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError("custom_id must be a non-empty string")
    if line.get("method") != "POST":
        raise ValueError("method must be POST")
    if url not in URLS:
        raise ValueError(f"url must be one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise ValueError("body must be a JSON object")
    return RequestLine(custom_id, url, body)
