"""What an assistant's turn consists of, by the marks that Qwen3 sets in its text: a thought, an answer, calls of tools.

Works on finished text. What has no such marks, or wrong ones, is answer: nothing of the text is lost.
"""

import json
from dataclasses import dataclass

_THOUGHT, _THOUGHT_END = "<think>", "</think>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"


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
    content, calls = _without_calls(answer) if tool_calls else (answer, ())
    content = content.strip() if closed or calls else content
    return ChatOutput(content, thought.strip().removeprefix(_THOUGHT).strip(), calls)


def _without_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """What is left of the text, and the calls. Takes linear time: a model may write opening marks alone."""
    left: list[str] = []
    calls: list[ToolCall] = []
    at = 0
    while (begin := text.find(_CALL, at)) >= 0 and (end := text.find(_CALL_END, begin)) >= 0:
        call = _call(text[begin + len(_CALL) : end])
        left.append(text[at : begin if call is not None else end + len(_CALL_END)])
        if call is not None:
            calls.append(call)
        at = end + len(_CALL_END)
    return "".join([*left, text[at:]]), tuple(calls)


def _call(text: str) -> ToolCall | None:
    """None for text that is no call."""
    try:
        call = json.loads(text)
        match call:
            case {"name": str(name), "arguments": dict(arguments)}:  # NaN and Infinity, which are no JSON, read as such
                return ToolCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (ValueError, RecursionError):
        pass
    return None
