"""Completions and errors to OpenAI's response bodies. Does no I/O."""

import time
import uuid
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from shared.errors import DeadlineExceeded, InvalidRequest, LimitExceeded, TandemError
from tandem.batch.field_names import in_openais_names
from tandem.batch.request_lines import CHAT, RequestLine
from tandem.chat_output import ToolCall, parse_chat_output
from tandem.token_values import TokenLogprob
from tandem.values import Completion, Sample


def response_of(request: RequestLine, model_name: str, completions: Sequence[Completion]) -> dict[str, Any]:
    """The line of a request that was computed."""
    chat = request.url == CHAT
    choice = _chat_choice if chat else _text_choice
    choices = [choice(request, completion, sample) for completion in completions for sample in completion.samples]
    request_id = completions[0].request_id
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model_name,
        "choices": [{"index": index, **choice} for index, choice in enumerate(choices)],
        "usage": _usage(completions),
    }
    return _line(request, 200, request_id, body)


def _chat_choice(request: RequestLine, completion: Completion, sample: Sample) -> dict[str, Any]:
    """Calls are told as calls if the model was given tools and may call them."""
    body = request.body
    output = parse_chat_output(sample.text, tool_calls=bool(body.get("tools")) and body.get("tool_choice") != "none")
    calls = output.tool_calls[:1] if body.get("parallel_tool_calls") is False else output.tool_calls
    message: dict[str, Any] = {"role": "assistant", "content": output.content, "refusal": None}
    if output.reasoning_content:
        message["reasoning_content"] = output.reasoning_content
    reason: str = sample.finish.reason
    if calls:
        message |= {"content": output.content or None, "tool_calls": [_tool_call(call) for call in calls]}
        reason = "tool_calls" if reason == "stop" else reason
    logprobs = {"content": [_chat_logprob(token) for token in sample.logprobs]} if sample.logprobs else None
    return {"message": message, "logprobs": logprobs, "finish_reason": reason}


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _chat_logprob(token: TokenLogprob) -> dict[str, Any]:
    top = [{"token": one.text, "logprob": one.logprob, "bytes": one.bytes} for one in token.top_logprobs]
    return {"token": token.text, "logprob": token.logprob, "bytes": token.bytes, "top_logprobs": top}


def _text_choice(request: RequestLine, completion: Completion, sample: Sample) -> dict[str, Any]:
    echoed = completion.prompt.text if completion.prompt is not None else ""
    logprobs = _text_logprobs(sample.logprobs, len(echoed)) if sample.logprobs else None
    return {"text": echoed + sample.text, "logprobs": logprobs, "finish_reason": sample.finish.reason}


def _text_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """Of the output's tokens, not of an echoed prompt's."""
    lengths = [len(token.text) for token in tokens]
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{one.text: one.logprob for one in token.top_logprobs} for token in tokens],
        "text_offset": list(accumulate(lengths, initial=offset))[:-1],
    }


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
        error = in_openais_names(error, request.body)
        status, kind, field = 400, "invalid_request_error", error.field
        if field == "model":
            status, code = 404, "model_not_found"
    elif isinstance(error, LimitExceeded):
        status, kind = 400, "invalid_request_error"
    elif isinstance(error, DeadlineExceeded):
        status, kind = 504, "timeout"
    body = {"error": {"message": str(error), "type": kind, "param": field, "code": code}}
    return _line(request, status, uuid.uuid4().hex, body)


def _line(request: RequestLine, status: int, request_id: str, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": f"batch_req_{request_id}", "custom_id": request.custom_id, "response": response, "error": None}
