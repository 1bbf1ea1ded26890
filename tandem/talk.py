"""What `tandem generate` and `tandem chat` print: streams of a running scheduler on the terminal."""

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from shared.errors import Unavailable
from shared.security import ClientSecurity
from tandem.client import Client
from tandem.values import Delta

RESUME_TIMEOUT_S = 10.0
"""Shorter than the library's: somebody is watching."""
NOBODY_LISTENS = "failed to connect"
"""So begins what gRPC says where it found no server, and TLS is not why."""

_notes = Console(stderr=True, highlight=False, style="dim")


def generate(endpoint: str, security: ClientSecurity, prompt: str, *, as_json: bool, **parameters: Any) -> None:
    """Streams the continuation of `prompt`: text with a summary on standard error, or one JSON object per piece."""
    with connected(endpoint, security) as client:
        started = time.monotonic()
        for delta in client.generate(prompt, **parameters):
            if as_json:
                print(json.dumps(dataclasses.asdict(delta)), flush=True)
            else:
                show(delta, started)


def chat(endpoint: str, security: ClientSecurity, *, system: str | None, **parameters: Any) -> None:
    """Turn by turn until the end of standard input."""
    messages = [{"role": "system", "content": system}] if system else []
    with connected(endpoint, security) as client:
        while (said := _ask()) is not None:
            messages.append({"role": "user", "content": said})
            answer, started = "", time.monotonic()
            for delta in client.generate(messages, **parameters):
                answer += delta.text
                show(delta, started)
            messages.append({"role": "assistant", "content": answer})


@contextlib.contextmanager
def connected(endpoint: str, security: ClientSecurity) -> Iterator[Client]:
    """A client of a running scheduler, or of several with commas. Where none listens, how to start one is told."""
    with Client(endpoint.split(","), security=security, resume_timeout=RESUME_TIMEOUT_S) as client:
        try:
            yield client
        except Unavailable as error:
            hint = " (`tandem serve` starts a server)" if str(error).startswith(NOBODY_LISTENS) else ""
            raise Unavailable(f"{endpoint}: {error}{hint}") from None


def _ask() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def show(delta: Delta, started: float) -> None:
    """Prints a piece of text as it comes, and after the last one how it ended and how fast it was."""
    if delta.echo:
        print(delta.echo.text, end="")
    print(delta.text, end="", flush=True)
    if delta.finish and delta.usage:
        seconds, tokens = time.monotonic() - started, delta.usage.completion_tokens
        print(flush=True)
        _notes.print(
            f"[{tokens} tokens, {tokens / seconds:.0f} tokens/s, ended by {delta.finish.reason}]", markup=False
        )
