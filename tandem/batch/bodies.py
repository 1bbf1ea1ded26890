"""OpenAI's request bodies to Tandem's options.

Does no I/O. A field that would change the answer and is not known is refused, never ignored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.errors import InvalidRequest
from tandem.batch.request_lines import CHAT, RequestLine
from tandem.requests import Prompt

_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "n"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words", "allowed_token_ids"),
)
_STOPPING = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos")
_OUTPUT = ("include_stop_str_in_output", "skip_special_tokens")
_LANGUAGE = ("regex", "grammar", "choice", "structural_tag")
_NAMES = {name: name for name in (*_SAMPLING, *_STOPPING, *_OUTPUT, *_LANGUAGE, "cache_salt", "priority")}
_CHAT_NAMES = _NAMES | {
    "max_completion_tokens": "max_tokens",
    "tools": "tools",
    "tool_choice": "tool_choice",
    "parallel_tool_calls": "parallel_tool_calls",
    "chat_template_kwargs": "template_kwargs",
    "add_generation_prompt": "add_generation_prompt",
}
_TEXT_NAMES = _NAMES | {"echo": "echo"}
_CONVERTED = {"logit_bias", "logprobs", "top_logprobs", "response_format"}
_WITHOUT_EFFECT = {"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_NEUTRAL: dict[str, Sequence[Any]] = {
    "stream": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
}
"""Fields that only these values leave without effect."""


@dataclass(frozen=True, slots=True)
class Work:
    """What to ask the client for: one completion a prompt, all with the same options."""

    prompts: tuple[Prompt, ...]
    options: dict[str, Any]


def work_of(request: RequestLine, model_name: str) -> Work:
    """Raises InvalidRequest, naming the field."""
    body = {name: value for name, value in request.body.items() if value is not None}
    if body.get("model", model_name) != model_name:
        raise InvalidRequest("model", f"{body['model']!r} is not served here, {model_name!r} is")
    chat = request.url == CHAT
    names = _CHAT_NAMES if chat else _TEXT_NAMES
    options = {names[name]: value for name, value in body.items() if name in names} | _converted(body, chat)
    for name in body.keys() - names.keys() - _CONVERTED - _WITHOUT_EFFECT - {"messages" if chat else "prompt"}:
        if body[name] not in _NEUTRAL.get(name, ()):
            raise InvalidRequest(name, "is not supported by tandem batch")
    if isinstance(options.get("seed"), int):
        options["seed"] %= 1 << 64  # OpenAI's are signed
    if chat:
        _check_tools(body.get("tools", []))
    return Work((_messages(body),) if chat else _prompts(body), options)


def _converted(body: Mapping[str, Any], chat: bool) -> dict[str, Any]:
    """Options whose form differs: JSON's keys are texts, and chats ask for logprobs by two fields."""
    options = _language(body.get("response_format"))
    if bias := body.get("logit_bias"):
        try:
            options["logit_bias"] = {int(token): float(value) for token, value in bias.items()}
        except (AttributeError, TypeError, ValueError):
            raise InvalidRequest("logit_bias", "must be an object of token ids and numbers") from None
    logprobs = body.get("logprobs", False)
    if chat and not isinstance(logprobs, bool):
        raise InvalidRequest("logprobs", "must be true or false; top_logprobs is the number")
    if "top_logprobs" in body and not (chat and logprobs):
        raise InvalidRequest("top_logprobs", "requires logprobs to be true, in chats")
    if logprobs is not False:
        options["logprobs"] = body.get("top_logprobs", 0) if chat else logprobs
    return options


def _language(response_format: Any) -> dict[str, Any]:
    match response_format:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return {"json_schema": schema}
    problem = f"must be of type text, json_object, or json_schema with a schema; {', '.join(_LANGUAGE)} are fields"
    raise InvalidRequest("response_format", f"{problem} of the body")


def _check_tools(tools: Any) -> None:
    """A tool without a name can't be called, and of two with one name a call would not tell which."""
    if not isinstance(tools, list):
        raise InvalidRequest("tools", "must be a list")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        match tool:
            case {"type": "function", "function": {"name": str(name)}} if name:
                if name in names:
                    raise InvalidRequest(f"tools[{index}].function.name", f"{name!r} is that of an earlier tool")
                names.add(name)
            case _:
                raise InvalidRequest(f"tools[{index}]", "must be of type function, with a function that has a name")


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages", "must be a list of at least one message")
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: Any) -> dict[str, Any]:
    """Content in parts becomes one text: the model reads no other kind."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"messages[{index}]", "must be an object with a role")
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    if not all(isinstance(part, str) for part in parts):
        raise InvalidRequest(f"messages[{index}].content", "only parts of type text are supported")
    return {**message, "content": "".join(map(str, parts))}


def _prompts(body: Mapping[str, Any]) -> tuple[Prompt, ...]:
    """A text, ids, or a list of either."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return tuple(prompt)
    if not isinstance(prompt, str | list):
        raise InvalidRequest("prompt", "must be text, token ids, or a list of them")
    return (prompt,)
