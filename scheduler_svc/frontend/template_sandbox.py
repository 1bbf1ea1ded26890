"""Jinja's sandbox, which keeps a template from objects that it was not given, with a budget of time and memory.

Whatever makes text or lists spends from the budget of the rendering: operators, filters, methods, what is printed. What
could make much of little at once is judged before it is done. Knows nothing of chats.
"""

import re
import time
from collections.abc import Callable, Sized
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_BITS = 4096
"""Of a number that is computed."""

_ABSENT_FILTERS = ("batch", "random", "slice", "urlize", "wordwrap", "xmlattr")
"""Their cost can't be told beforehand, and nothing in a prompt needs them."""
_TOO_WIDE = "it formats with too large a width"
_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill"})
_ABSENT_METHODS = frozenset({"expandtabs", "translate", "maketrans"})
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\d{5}|\*)")
_WIDE_FIELD = re.compile(r"\{[^{}]*(\d{5}|\{)")


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


class _Concatenating(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """The operator ~, which the sandbox does not see of itself."""
        self.write("environment.concatenate((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """An environment whose templates render within `budget`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _Concatenating

    def __init__(self, **options: Any) -> None:
        # Not optimized: else parts would be computed, without a budget, when the template is read.
        super().__init__(optimized=False, finalize=_spend, **options)
        for name in _ABSENT_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        self.globals["_tick"] = _tick
        self.filters = {name: bounded(name, function) for name, function in self.filters.items()}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Called by jinja."""
        return attr not in _ABSENT_METHODS and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Called by templates."""
        _judge_operator(operator, left, right)
        return _spend(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *arguments: Any, **named: Any) -> Any:
        """Called by templates, for functions and methods."""
        _judge_call(__obj, arguments, named)
        return _spend(super().call(__context, __obj, *arguments, **named))

    def concatenate(self, parts: tuple[Any, ...]) -> str:
        """Called by templates."""
        return str(_spend("".join(map(str, parts))))


def _spend(value: Any) -> Any:
    return budget.get().spend(value)


def _judge_operator(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * max(right, 0)}
        if bits.get(operator, 0) > MOST_BITS:
            raise jinja2.TemplateRuntimeError("it computes too large a number")
    elif operator == "*" and (isinstance(left, Sized) or isinstance(right, Sized)):
        size, times = (len(left), right) if isinstance(left, Sized) else (len(right), left)
        budget.get().afford(size * max(times, 0))
    elif operator == "%" and isinstance(left, str) and _WIDE_PERCENT.search(left):
        raise jinja2.TemplateRuntimeError(_TOO_WIDE)


def _judge_call(function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Of all that templates may call, methods of text make much of little; they have no arguments by name."""
    function = getattr(function, "__wrapped__", function)  # the sandbox wraps what formats
    text, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if not isinstance(text, str):
        return
    if name == "format":
        if _WIDE_FIELD.search(text.replace("{{", "")):
            raise jinja2.TemplateRuntimeError(_TOO_WIDE)
    elif name == "replace":
        _judge_replace(text, *arguments)
    elif name == "join" and isinstance(arguments[0], Sized):
        _judge_join(arguments[0], text)
    elif name in _PADDING_METHODS:
        _judge_widths(*arguments)


def _judge_replace(text: str, old: str = "", new: str = "", *count: Any) -> None:
    budget.get().afford(len(text) + text.count(old) * len(new))


def _judge_join(items: Sized, separator: str = "", *attribute: Any) -> None:
    budget.get().afford(len(separator) * len(items))


def _judge_widths(*arguments: Any) -> None:
    for argument in arguments:
        if isinstance(argument, int):
            budget.get().afford(argument)


def _tick() -> str:
    """Called by every turn of a loop."""
    return str(_spend(""))


def bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter within the budget."""
    passed = int(hasattr(function, "jinja_pass_arg"))  # a context comes before the value

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        context, (value, *further) = arguments[:passed], arguments[passed:]
        if name == "replace":
            value = str(value)
            _judge_replace(value, *further, *named.values())
        elif name == "join":
            value = value if isinstance(value, Sized) else list(value)
            _judge_join(value, *map(str, (*further, *named.values())))
        elif name == "format":
            _judge_operator("%", str(value), None)
        elif name == "indent":
            _judge_widths(*(width * (str(value).count("\n") + 1) for width in (*further, *named.values())))
        elif name == "center":
            _judge_widths(*further, *named.values())
        return _spend(function(*context, value, *further, **named))

    return call
