"""OpenAI's request bodies to Tandem's options, and completions and errors to OpenAI's response bodies.

Does no I/O. A field that would change the answer and is not known is refused, never ignored.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.errors import DeadlineExceeded, InvalidRequest, TandemError
from tandem.batch.request_lines import CHAT, RequestLine
from tandem.requests import Prompt
from tandem.values import Completion, Sample

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "n")
_STOPPING = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos")
_NAMES = {name: name for name in (*_SAMPLING, *_STOPPING, "cache_salt", "priority")}
_CHAT_NAMES = _NAMES | {
    "max_completion_tokens": "max_tokens",
    "tools": "tools",
    "chat_template_kwargs": "template_kwargs",
    "add_generation_prompt": "add_generation_prompt",
}
_WITHOUT_EFFECT = {"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_NEUTRAL: dict[str, Sequence[Any]] = {
    "stream": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "response_format": ({"type": "text"},),
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
    names = _CHAT_NAMES if chat else _NAMES
    options = {names[name]: value for name, value in body.items() if name in names}
    for name in body.keys() - names.keys() - _WITHOUT_EFFECT - {"messages" if chat else "prompt"}:
        if body[name] not in _NEUTRAL.get(name, ()):
            raise InvalidRequest(name, "is not supported by tandem batch")
    if isinstance(options.get("seed"), int):
        options["seed"] %= 1 << 64  # OpenAI's are signed
    return Work((_messages(body),) if chat else _prompts(body), options)


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


def response_of(request: RequestLine, model_name: str, completions: Sequence[Completion]) -> dict[str, Any]:
    """The line of a request that was computed."""
    chat = request.url == CHAT
    choice = _chat_choice if chat else _text_choice
    samples = [sample for completion in completions for sample in completion.samples]
    request_id = completions[0].request_id
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model_name,
        "choices": [choice(index, sample) for index, sample in enumerate(samples)],
        "usage": _usage(completions),
    }
    return _line(request, 200, request_id, body)


def _chat_choice(index: int, sample: Sample) -> dict[str, Any]:
    message = {"role": "assistant", "content": sample.text, "refusal": None}
    return {"index": index, "message": message, "logprobs": None, "finish_reason": sample.finish.reason}


def _text_choice(index: int, sample: Sample) -> dict[str, Any]:
    return {"index": index, "text": sample.text, "logprobs": None, "finish_reason": sample.finish.reason}


def _usage(completions: Sequence[Completion]) -> dict[str, Any]:
    """The samples of one completion share its prompt."""
    first = [completion.samples[0].usage for completion in completions]
    prompt = sum(usage.prompt_tokens for usage in first)
    output = sum(sample.usage.completion_tokens for completion in completions for sample in completion.samples)
    cached = {"cached_tokens": sum(usage.cached_tokens for usage in first)}
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return {**counts, "prompt_tokens_details": cached}


def error_of(request: RequestLine, error: TandemError) -> dict[str, Any]:
    """The line of a request that failed, with the status and body of OpenAI's API."""
    status, kind, field, code = 500, "server_error", None, None
    if isinstance(error, InvalidRequest):
        status, kind, field = 400, "invalid_request_error", error.field
        if field == "model":
            status, code = 404, "model_not_found"
    elif isinstance(error, DeadlineExceeded):
        status, kind = 504, "timeout"
    body = {"error": {"message": str(error), "type": kind, "param": field, "code": code}}
    return _line(request, status, uuid.uuid4().hex, body)


def _line(request: RequestLine, status: int, request_id: str, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": f"batch_req_{request_id}", "custom_id": request.custom_id, "response": response, "error": None}
