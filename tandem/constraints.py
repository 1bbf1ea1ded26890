"""The language that an output must be in, as a caller of the client library writes it. The server checks it."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

from shared.errors import InvalidRequest
from shared.pb import generation_pb2 as pb


class ConstraintOptions(TypedDict, total=False):
    """The language that the output must be in: at most one of these, see docs/constrain.md."""

    json_schema: str | Mapping[str, Any]
    """JSON that this schema accepts."""
    json_object: bool
    """Any JSON object."""
    regex: str
    """Text that this regular expression matches as a whole."""
    grammar: str
    """Text that this context-free grammar produces: Lark or EBNF."""
    choice: Sequence[str]
    """One of these texts."""
    structural_tag: str | Mapping[str, Any]
    """Free text with JSON after given tags: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}."""
    tool_choice: str | Mapping[str, Any]
    """"required" (calls of the tools and nothing else), {"type": "function", "function": {"name": ...}} (of this one),
    or "auto" or "none" (any text)."""
    parallel_tool_calls: bool
    """With tool_choice: whether there may be more than one call. Default True."""
    enable_in_reasoning: bool
    """Whether the language holds within a thought that the prompt has opened, too. Default False: after it."""


def constraint_from(options: Mapping[str, Any]) -> pb.Constraint | None:
    """Of ConstraintOptions. Raises InvalidRequest for more than one, or for a value that its field can't hold."""
    given = [name for name in _LANGUAGES if options.get(name) not in (None, *_ANY_TEXT.get(name, ()))]
    if not given:
        return None
    if len(given) > 1:
        raise InvalidRequest("constraint", f"only one of {' and '.join(given)} may be given")
    (name,) = given
    with naming(name):
        constraint = pb.Constraint(**{name: _CONVERTERS.get(name, _same)(options[name])})
    with naming("enable_in_reasoning"):
        constraint.enable_in_reasoning = options.get("enable_in_reasoning", False)
    if name == "tool_choice" and "parallel_tool_calls" in options:
        with naming("parallel_tool_calls"):
            constraint.tool_choice.parallel_tool_calls = options["parallel_tool_calls"]
    return constraint


@contextlib.contextmanager
def naming(field: str) -> Iterator[None]:
    """protobuf's complaint about a value names no field. Text with half a character is such a value too."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise InvalidRequest(field, str(error)) from None


def _same(value: Any) -> Any:
    return value


def _json_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _choice(choices: Sequence[str]) -> pb.Choice:
    if isinstance(choices, str):
        raise TypeError("must be a sequence of texts, not one text")
    return pb.Choice(choices=choices)


def _tool_choice(chosen: Any) -> pb.ToolChoice:
    match chosen:
        case "required":
            return pb.ToolChoice()
        case {"function": {"name": name}}:
            return pb.ToolChoice(function=name)
    raise ValueError(f"must be auto, none, required or a function, not {chosen!r}")


_LANGUAGES = ("json_schema", "json_object", "regex", "grammar", "choice", "structural_tag", "tool_choice")
_CONVERTERS: Mapping[str, Callable[[Any], Any]] = {
    "json_schema": _json_text,
    "choice": _choice,
    "structural_tag": _json_text,
    "tool_choice": _tool_choice,
}
_ANY_TEXT: Mapping[str, tuple[Any, ...]] = {"json_object": (False,), "tool_choice": ("auto", "none")}
"""Values that ask for nothing."""
