"""What one rendering of a template may take, in time and in text, and how much text a value makes.

Knows neither templates nor which of their operations make text: template_sandbox does.
"""

import time
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from itertools import chain
from typing import Any

import jinja2
from jinja2.utils import Namespace

_ITEM = 16
"""Of what is neither text nor number, and of an item beside its own text: characters, in round numbers."""


class Budget:
    """What one rendering may take."""

    def __init__(self, seconds: float, size: int) -> None:
        """`size`: characters and list items, all together."""
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._left = size

    def afford(self, size: int) -> None:
        """Before it is made. Raises TemplateRuntimeError."""
        if size > self._left:
            raise jinja2.TemplateRuntimeError("it makes too much text")

    def afford_text(self, *values: Any, times: int = 1) -> None:
        """Before text is made of the values, so many times: a list may hold the same long text often."""
        if times:
            self.afford(times * _text_size(values, self._left // times))

    def spend(self, value: Any) -> Any:
        """After it was made; the value. Raises TemplateRuntimeError."""
        if time.monotonic() > self._deadline:
            raise jinja2.TemplateRuntimeError(f"rendering took longer than {self._seconds:g} s")
        if isinstance(value, str | list | tuple):
            self.afford(len(value))
            self._left -= len(value)
        return value


budget: ContextVar[Budget] = ContextVar("budget")
"""Of the rendering that goes on in this thread."""


def _text_size(value: Any, most: int) -> int:
    """Characters of str(value), about; not counted on beyond `most`."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3 + 1
    if isinstance(value, Namespace):
        return most + 1  # tells all that it holds, which nobody needs
    if not isinstance(value, Collection):
        return _ITEM
    size = 0
    for item in chain(value, value.values()) if isinstance(value, Mapping) else value:
        if size > most:
            break
        size += _ITEM + _text_size(item, most - size)
    return size
