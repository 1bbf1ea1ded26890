"""The parts of an assistant's turn: what Qwen3's chat template makes of parts comes apart into them again."""

import json
import re
from functools import cache, partial
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem import ChatOutput, ToolCall, parse_chat_output
from tests.frontend.model_folder import CHAT_TEMPLATE

ANY_TEXT = st.text(st.characters(exclude_categories=("Cs",)))
TEXTS = st.text(st.characters(exclude_characters="<", exclude_categories=("Cs",))).map(str.strip)
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | ANY_TEXT, lambda inner: st.lists(inner, max_size=3))
CALLS = st.lists(
    st.tuples(st.from_regex(r"[a-z_]{1,9}", fullmatch=True), st.dictionaries(ANY_TEXT, VALUES, max_size=3))
)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@cache
def template() -> jinja2.Template:
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    return environment.from_string(re.sub(r"{%- (end)?generation %}", "", CHAT_TEMPLATE))


def written(**message: Any) -> str:
    """The turn as the template spells it: what the model was taught to write."""
    text = template().render(messages=[{"role": "user", "content": "?"}, {"role": "assistant", **message}])
    return text.rpartition("<|im_start|>assistant\n")[2].removesuffix("\n").removesuffix("<|im_end|>")


@given(TEXTS, TEXTS, CALLS)
def test_what_the_template_makes_of_parts_comes_apart_into_them(
    thought: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    tool_calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    text = written(content=content, reasoning_content=thought, tool_calls=tool_calls)
    output = parse_chat_output(text)
    assert (output.content, output.reasoning_content) == (content, thought)
    assert [(call.name, json.loads(call.arguments)) for call in output.tool_calls] == calls
    assert parse_chat_output(text.removeprefix("<think>\n")) == output, "the prompt may have opened the thought"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (" plain\n", ChatOutput(" plain\n")),
        ("", ChatOutput("")),
        ("<think>\nhm, cut", ChatOutput("", "hm, cut")),
        ("<think>\n\n</think>\n\nyes", ChatOutput("yes")),
        (f"{CALL}{CALL[:-3]}", ChatOutput(CALL[:-3], tool_calls=(ToolCall("f", '{"a": 1}'),))),
        ("<tool_call>{</tool_call>", ChatOutput("<tool_call>{</tool_call>")),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', None),
        ('<tool_call>{"name": "f", "arguments": 1}</tool_call>', None),
        ("<tool_call>[]</tool_call>", None),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', None),
        ('<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', None),
        (f"a{CALL}b{CALL}c<tool_call>", ChatOutput("abc<tool_call>", tool_calls=(ToolCall("f", '{"a": 1}'),) * 2)),
        pytest.param("<tool_call>\n" * 200_000, None, id="opening marks alone, which must not take hours"),
    ],
)
def test_what_is_cut_or_no_call_stays_in_the_text(text: str, parts: ChatOutput | None) -> None:
    assert parse_chat_output(text) == (parts or ChatOutput(text))


def test_calls_stay_in_the_text_for_who_gave_no_tools() -> None:
    assert parse_chat_output(CALL, tool_calls=False) == ChatOutput(CALL)
