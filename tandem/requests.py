"""Turns what a caller of the client library writes into requests. Checks nothing that the server checks."""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, Unpack

from shared.pb import generation_pb2 as pb
from tandem.values import ChatMessage

Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatMessage | Mapping[str, Any]]
"""Text, token ids, or a conversation: for the model's own chat template."""


class ChatOptions(TypedDict, total=False):
    """What the model's chat template may be told besides the messages."""

    tools: Sequence[Mapping[str, Any]]
    """Tool descriptions (JSON schema objects)."""
    template_kwargs: Mapping[str, Any]
    """Further variables, for instance {"enable_thinking": False}."""
    add_generation_prompt: bool
    """Ends the prompt with the opening of an assistant turn. Default True."""


class GenerateOptions(ChatOptions, total=False):
    """How to continue a prompt. What is left out is the server's matter: the model's generation_config.json."""

    max_tokens: int
    """Most output tokens. Default: up to the context limit."""
    min_tokens: int
    """Fewest output tokens."""
    temperature: float
    """0 takes the most likely token."""
    top_k: int
    """0 keeps all."""
    top_p: float
    """1 keeps all."""
    min_p: float
    """0 keeps all."""
    seed: int
    """The same seed and prompt give the same output."""
    stop: Sequence[str]
    """Ends a sample where one of these appears; it is not shown."""
    stop_token_ids: Sequence[int]
    """Ends a sample with one of these."""
    ignore_eos: bool
    """Goes on past end-of-sequence tokens."""
    n: int
    """Number of samples."""
    sample_index: int
    """Index of the first sample."""
    output_token_ids: Sequence[int]
    """Continues after these, received earlier for the same prompt and seed."""
    request_id: str
    """Name among the live requests. Default: a random one."""
    cache_salt: str
    """Requests with different salts never share cached K/V."""
    priority: int
    """Smaller is more important."""
    timeout: float
    """Seconds for the whole request; then DeadlineExceeded. Default: none."""


_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
_STOPPING = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos")
_DIRECT = ("n", "sample_index", "cache_salt", "priority")


def generate_request(prompt: Prompt, **options: Unpack[GenerateOptions]) -> pb.GenerateRequest:
    """Raises TypeError for an option that does not exist, ValueError for a number that its field can't hold."""
    unknown = options.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"no such option: {', '.join(sorted(unknown))}")
    request = pb.GenerateRequest(
        request_id=options.get("request_id") or uuid.uuid4().hex,
        sampling=pb.SamplingParams(**_among(options, _SAMPLING)),
        stopping=pb.StoppingParams(**_among(options, _STOPPING)),
        **_among(options, _DIRECT),
    )
    if "output_token_ids" in options:
        request.output_token_ids.ids.extend(options["output_token_ids"])
    if isinstance(prompt, str):
        request.text = prompt
    elif _is_chat(prompt):
        request.chat.CopyFrom(chat_prompt(prompt, options))
    else:
        request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))  # type: ignore[arg-type]
    return request


def tokenize_request(prompt: Prompt, **options: Unpack[ChatOptions]) -> pb.TokenizeRequest:
    """`prompt` is text or a conversation."""
    if isinstance(prompt, str):
        return pb.TokenizeRequest(text=prompt)
    return pb.TokenizeRequest(chat=chat_prompt(prompt, options))


def _among(options: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}


def _is_chat(prompt: Prompt) -> bool:
    return bool(prompt) and isinstance(prompt[0], ChatMessage | Mapping)


def chat_prompt(messages: Sequence[Any], options: Mapping[str, Any]) -> pb.ChatPrompt:
    """Messages are ChatMessages or mappings with role, content and perhaps further keys."""
    chat = pb.ChatPrompt(tools_json=[json.dumps(tool) for tool in options.get("tools", ())])
    if "template_kwargs" in options:
        chat.template_kwargs_json = json.dumps(options["template_kwargs"])
    if "add_generation_prompt" in options:
        chat.add_generation_prompt = options["add_generation_prompt"]
    chat.messages.extend(_message(message) for message in messages)
    return chat


def _message(message: ChatMessage | Mapping[str, Any]) -> pb.ChatMessage:
    if not isinstance(message, ChatMessage):
        extra = {key: value for key, value in message.items() if key not in ("role", "content")}
        message = ChatMessage(message["role"], message.get("content") or "", extra)
    extra_json = json.dumps(message.extra) if message.extra else ""
    return pb.ChatMessage(role=message.role, content=message.content, extra_json=extra_json)
