"""Turns what a caller of the client library writes into requests. Checks nothing that the server checks."""

import json
import secrets
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, TypeVar, Unpack

from google.protobuf.message import Message

from shared.errors import InvalidRequest
from shared.pb import generation_pb2 as pb
from tandem.constraints import ConstraintOptions, constraint_from, naming
from tandem.values import ChatMessage

M = TypeVar("M", bound=Message)

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


class GenerateOptions(ChatOptions, ConstraintOptions, total=False):
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
    presence_penalty: float
    """Taken once from the logit of each token in the output, -2 to 2."""
    frequency_penalty: float
    """Taken from the logit of a token for each time that it is in the output, -2 to 2."""
    repetition_penalty: float
    """Above 1 discourages tokens that are in prompt or output, below 1 encourages them."""
    logit_bias: Mapping[int, float]
    """Token ids and what is added to their logits, -100 to 100."""
    bad_words: Sequence[str]
    """Texts that the output may not contain."""
    allowed_token_ids: Sequence[int]
    """The only tokens that may be sampled."""
    seed: int
    """The same seed and prompt give the same output. Default: a random one."""
    stop: str | Sequence[str]
    """Ends a sample where this, or one of these, appears; it is not shown."""
    include_stop_str_in_output: bool
    """Shows what ended a sample: the stop string, or the text of the stop token."""
    skip_special_tokens: bool
    """Leaves special tokens out of the text. Default True."""
    echo: bool
    """Returns the prompt, too."""
    logprobs: int
    """With each token its logprob and those of so many most likely tokens, 0 to 20."""
    prompt_logprobs: int
    """The same for the tokens of the prompt."""
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


_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "allowed_token_ids"),
)
_OUTPUT = ("include_stop_str_in_output", "skip_special_tokens", "echo", "logprobs", "prompt_logprobs")
_STOPPING = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos")
_DIRECT = ("request_id", "n", "sample_index", "cache_salt", "priority")


def generate_request(prompt: Prompt, **options: Unpack[GenerateOptions]) -> pb.GenerateRequest:
    """Raises TypeError for an option that does not exist, InvalidRequest for a value that its field can't hold."""
    unknown = options.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"no such option: {', '.join(sorted(unknown))}")
    given: dict[str, Any] = {**options, "request_id": options.get("request_id") or uuid.uuid4().hex}
    if given.get("seed") is None:
        given["seed"] = secrets.randbits(64)  # else a stream that is cut could not be continued elsewhere
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]  # a string is a sequence of strings: one letter each
    if "allowed_token_ids" in given:
        with naming("allowed_token_ids"):
            given["allowed_token_ids"] = pb.TokenIds(ids=given["allowed_token_ids"])
    request = _filled(pb.GenerateRequest, given, _DIRECT)
    request.sampling.CopyFrom(_filled(pb.SamplingParams, given, _SAMPLING))
    request.stopping.CopyFrom(_filled(pb.StoppingParams, given, _STOPPING))
    request.output.CopyFrom(_filled(pb.OutputParams, given, _OUTPUT))
    if (constraint := constraint_from(options)) is not None:
        request.constraint.CopyFrom(constraint)
    if "output_token_ids" in given:
        with naming("output_token_ids"):
            request.output_token_ids.ids.extend(given["output_token_ids"])
    if isinstance(prompt, str):
        _set_text(request, prompt)
    elif _is_chat(prompt):
        request.chat.CopyFrom(chat_prompt(prompt, options))
    else:
        with naming("token_ids"):
            request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))  # type: ignore[arg-type]
    return request


def tokenize_request(prompt: Prompt, **options: Unpack[ChatOptions]) -> pb.TokenizeRequest:
    """`prompt` is text or a conversation."""
    request = pb.TokenizeRequest()
    if isinstance(prompt, str):
        _set_text(request, prompt)
    elif _is_chat(prompt):
        request.chat.CopyFrom(chat_prompt(prompt, options))
    else:
        raise InvalidRequest("prompt", "must be text or messages")
    return request


def _filled(kind: type[M], options: Mapping[str, Any], names: Sequence[str]) -> M:
    """A message of those options that are given."""
    message = kind()
    for name in names:
        if name in options:
            with naming(name):
                message.MergeFrom(kind(**{name: options[name]}))
    return message


def _set_text(request: pb.GenerateRequest | pb.TokenizeRequest, text: str) -> None:
    with naming("text"):
        request.text = text


def _is_chat(prompt: Any) -> bool:
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise InvalidRequest("prompt", f"must be text, token ids or messages, not {type(prompt).__name__}")
    return bool(prompt) and isinstance(prompt[0], ChatMessage | Mapping)


def chat_prompt(messages: Sequence[Any], options: Mapping[str, Any]) -> pb.ChatPrompt:
    """Messages are ChatMessages or mappings with role, content and perhaps further keys."""
    chat = pb.ChatPrompt()
    with naming("tools"):
        chat.tools_json.extend(json.dumps(tool) for tool in options.get("tools", ()))
    with naming("template_kwargs"):
        chat.template_kwargs_json = json.dumps(options["template_kwargs"]) if "template_kwargs" in options else ""
    if "add_generation_prompt" in options:
        chat.add_generation_prompt = options["add_generation_prompt"]
    for index, message in enumerate(messages):
        with naming(f"messages[{index}]"):
            chat.messages.append(_message(message))
    return chat


def _message(message: ChatMessage | Mapping[str, Any]) -> pb.ChatMessage:
    if not isinstance(message, ChatMessage):
        if "role" not in message:
            raise ValueError("has no role")
        extra = {key: value for key, value in message.items() if key not in ("role", "content")}
        message = ChatMessage(message["role"], message.get("content") or "", extra)
    if not isinstance(message.content, str):
        raise TypeError(f"content must be text, not {type(message.content).__name__}")
    extra_json = json.dumps(message.extra) if message.extra else ""
    return pb.ChatMessage(role=message.role, content=message.content, extra_json=extra_json)
