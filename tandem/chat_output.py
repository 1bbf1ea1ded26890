"""What an assistant's turn consists of, by the marks that Qwen3 sets in its text: a thought, an answer, calls of tools.

Works on finished text. What has no such marks, or wrong ones, is answer: nothing of the text is lost.
"""

import json
import re
from dataclasses import dataclass

_THOUGHT, _THOUGHT_END = "<think>", "</think>"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called."""

    name: str
    arguments: str
    """A JSON object, as text."""


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """An assistant's turn in its parts."""

    content: str
    """The answer: what is neither thought nor call, without white space around it if there is either."""
    reasoning_content: str = ""
    """The thought."""
    tool_calls: tuple[ToolCall, ...] = ()
    """In the order of the text."""


def parse_chat_output(text: str, *, tool_calls: bool = True) -> ChatOutput:
    """The parts of an output whose prompt was a conversation.

    A thought reaches from the beginning to its closing mark; the opening one may stand at the prompt's end. Without
    `tool_calls` calls stay in the content, for who gave the model no tools.
    """
    thought, closed, answer = text.partition(_THOUGHT_END)
    if not closed:
        thought, answer = ("", text) if not text.lstrip().startswith(_THOUGHT) else (text, "")
    calls: list[ToolCall] = []

    def taken(block: re.Match[str]) -> str:
        call = _call(block[1])
        if call is None:
            return block[0]
        calls.append(call)
        return ""

    content = _CALL.sub(taken, answer) if tool_calls else answer
    content = content.strip() if closed or calls else content
    return ChatOutput(content, thought.strip().removeprefix(_THOUGHT).strip(), tuple(calls))


def _call(text: str) -> ToolCall | None:
    """None for text that is no call."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    match call:
        case {"name": str(name), "arguments": dict(arguments)}:
            return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
    return None
