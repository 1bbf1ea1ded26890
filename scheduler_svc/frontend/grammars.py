"""From a request's constraint to a grammar: what is asked for, bounded, in few forms. Compiles and imports nothing big.

`tool_calls` is for whoever speaks another API and has tools to choose from.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shared.errors import InvalidRequest
from shared.pb import generation_pb2 as pb

MAX_GRAMMAR_BYTES = 1 << 18
MAX_CHOICES = 4096

JSON_OPTIONS: Mapping[str, Any] = {"whitespace_pattern": r"( |\n[ \t]{0,32})?"}
"""Between the parts of JSON: nothing, a space, or a line break with an indent. Without a bound a model that is unsure
may put out white space until its limit. A schema's own "x-guidance" comes before it."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must be. Equal ones are compiled once."""

    field: str
    """The field of the request, for messages."""
    kind: Literal["json_schema", "regex", "ebnf"]
    """How to read the text; `ebnf` stands for Lark too."""
    text: str
    parts: tuple[str, ...] = ()
    """What each line of the text was made of, for messages; empty where the caller wrote it."""


def grammar_of(constraint: pb.Constraint, tools: Sequence[Mapping[str, Any]]) -> Grammar:
    """`tools` are those of the request's chat. Raises InvalidRequest."""
    kind = constraint.WhichOneof("language")
    if kind == "json_schema":
        grammar = Grammar("constraint.json_schema", "json_schema", constraint.json_schema)
    elif kind == "json_object":
        grammar = _json_object(constraint.json_object)
    elif kind == "regex":
        grammar = Grammar("constraint.regex", "regex", constraint.regex)
    elif kind == "grammar":
        grammar = Grammar("constraint.grammar", "ebnf", constraint.grammar)
    elif kind == "choice":
        grammar = _choice(constraint.choice.choices)
    elif kind == "structural_tag":
        grammar = structural_tag(constraint.structural_tag)
    elif kind == "tool_choice":
        chosen = constraint.tool_choice
        parallel = chosen.parallel_tool_calls if chosen.HasField("parallel_tool_calls") else True
        grammar = tool_calls(tools, chosen.function, parallel)
    else:
        names = [field.name for field in constraint.DESCRIPTOR.oneofs_by_name["language"].fields]
        raise InvalidRequest("constraint", f"one of {', '.join(names)} is required")
    size = len(grammar.text.encode())
    if not 1 <= size <= MAX_GRAMMAR_BYTES:
        raise InvalidRequest(grammar.field, f"has {size} bytes; 1 to {MAX_GRAMMAR_BYTES} are allowed")
    return grammar


def _json_object(wanted: bool) -> Grammar:
    if not wanted:
        raise InvalidRequest("constraint.json_object", "must be true; leave the constraint out for any text")
    return Grammar("constraint.json_object", "json_schema", '{"type": "object"}')


def _choice(choices: Sequence[str]) -> Grammar:
    field = "constraint.choice.choices"
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequest(field, f"has {len(choices)} texts; 1 to {MAX_CHOICES} are allowed")
    for index, choice in enumerate(choices):
        if not choice:
            raise InvalidRequest(f"{field}[{index}]", "must not be empty")
    alternatives = " | ".join(map(_literal, choices))
    return Grammar(field, "ebnf", f"start: CHOICE\nCHOICE: {alternatives}")


def tool_calls(tools: Sequence[Mapping[str, Any]], function: str = "", parallel: bool = True) -> Grammar:
    """Calls as Qwen3 writes them: `<tool_call>` and `</tool_call>` around name and arguments, each on its line.

    `tools` are OpenAI's, {"type": "function", "function": {"name", "parameters"}}, or functions themselves. One call,
    or with `parallel` one or more, of `function` or, where it is empty, of any. Raises InvalidRequest.
    """
    field = "constraint.tool_choice"
    functions = {index: _function(index, tool) for index, tool in enumerate(tools)}
    if not functions:
        raise InvalidRequest(field, "chat.tools_json has no tool to call")
    if function:
        functions = {index: known for index, known in functions.items() if known["name"] == function}
        if not functions:
            raise InvalidRequest(f"{field}.function", f"{function!r} is not the name of a tool in chat.tools_json")
    start = r'start: call ("\n" call)*' if parallel else "start: call"
    names = " | ".join(f"call{index}" for index in functions)
    call = rf'call: "<tool_call>\n" ({names}) "\n</tool_call>"'
    rules = [f"call{index}: {_call(known)}" for index, known in functions.items()]
    parts = (field, field, *(f"chat.tools_json[{index}].parameters" for index in functions))
    return Grammar(field, "ebnf", "\n".join([start, call, *rules]), parts)


def _function(index: int, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"chat.tools_json[{index}]", "has no function with a name: tool_choice needs one")
    return {"name": name, "parameters": function.get("parameters") or {"type": "object", "additionalProperties": False}}


def _call(function: Mapping[str, Any]) -> str:
    opening = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
    return f'{_literal(opening)} {_json(function["parameters"])} "}}"'


def structural_tag(text: str) -> Grammar:
    """{"structures": [{"begin", "schema", "end"}], "triggers": [...]}: where free text has put out a trigger, one of
    the structures that begin with it follows, whole. Raises InvalidRequest."""
    field = "constraint.structural_tag"
    try:
        asked = json.loads(text)
        structures = [(str(one["begin"]), one["schema"], str(one["end"])) for one in asked["structures"]]
        triggers = [str(trigger) for trigger in asked["triggers"]]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise InvalidRequest(
            field, f"must be JSON with structures (begin, schema, end) and triggers: {error}"
        ) from None
    rules = []
    for index, (begin, schema, end) in enumerate(structures):
        trigger = next((trigger for trigger in triggers if trigger and begin.startswith(trigger)), None)
        if trigger is None:
            raise InvalidRequest(f"{field}.structures[{index}].begin", f"{begin!r} begins with none of the triggers")
        parts = (_literal(begin[len(trigger) :]), _json(schema), _literal(end))
        rules.append(f"lead{index}[lazy]: TEXT {_literal(trigger)}")
        rules.append(f"tag{index}: lead{index} {' '.join(part for part in parts if part != _literal(''))}")
    tags = " | ".join(f"tag{index}" for index in range(len(structures)))
    head = f"start: ({tags})* rest" if tags else "start: rest"
    lines = [head, "rest: TEXT", r"TEXT: /(.|\n)*/", *rules]
    made_of = [f"structures[{index}].{part}" for index in range(len(structures)) for part in ("begin", "schema")]
    return Grammar(field, "ebnf", "\n".join(lines), (*["structures"] * 3, *made_of))


def _json(schema: Any) -> str:
    """JSON of a schema, within a grammar."""
    return f"%json {json.dumps(with_options(schema))}"


def with_options(schema: Any) -> Any:
    """A JSON schema that says how its JSON is spelled, unless it says so already."""
    return {"x-guidance": JSON_OPTIONS, **schema} if isinstance(schema, Mapping) else schema


def _literal(text: str) -> str:
    """A text as Lark's string literal, which is spelled like JSON's."""
    return json.dumps(text, ensure_ascii=False)
