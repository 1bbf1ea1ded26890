"""Text and chats to token ids and back, in threads of their own: the event loop never waits for a long prompt.

Owns the tokenizer and the chat template. Knows nothing of the core.
"""

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from scheduler_svc.frontend.chat_template import RESERVED_VARIABLES, load_chat_template
from scheduler_svc.frontend.config import FrontendConfig
from scheduler_svc.frontend.thoughts import Thoughts
from scheduler_svc.frontend.vocabulary import Vocabulary, load_tokenizer
from shared.errors import InvalidRequest
from shared.pb import generation_pb2 as pb
from shared.types import IntArray


class Prompts:
    """The model's tokenizer and chat template."""

    def __init__(self, config: FrontendConfig) -> None:
        """Raises StartupError where the model folder lacks something or has what is not supported."""
        self._config = config
        self.tokenizer = load_tokenizer(config.model)
        self._template = load_chat_template(config.model)
        self._threads = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenizer")
        self.vocabulary = Vocabulary(self.tokenizer)
        self.thoughts = Thoughts(self.tokenizer, self.vocabulary)

    async def encode(self, request: pb.GenerateRequest | pb.TokenizeRequest) -> IntArray:
        """Ids of a request's text or chat, [num_tokens]. Raises InvalidRequest."""
        encode = self._encode_chat if request.WhichOneof("prompt") == "chat" else self._encode_text
        return await asyncio.get_running_loop().run_in_executor(self._threads, encode, request)

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of ids that are within the vocabulary."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._decode, token_ids, skip_special_tokens)

    async def encode_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Ids of the words that an output may not contain. Raises InvalidRequest for one without."""
        if not words:
            return []
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._encode_words, words)

    def close(self) -> None:
        """Ends the threads after what they are doing."""
        self._threads.shutdown(cancel_futures=True)

    def _encode_text(self, request: pb.GenerateRequest | pb.TokenizeRequest) -> IntArray:
        size = len(request.text.encode())
        if size > self._config.max_prompt_bytes:
            raise InvalidRequest("text", f"has {size} bytes; at most {self._config.max_prompt_bytes} are allowed")
        return np.array(self.tokenizer.encode(request.text).ids, dtype=np.int32)

    def _encode_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Each as it stands at the beginning of a text and after a space: mostly these are different tokens."""
        encoded: dict[tuple[int, ...], None] = {}
        for index, word in enumerate(words):
            bare = word.lstrip() or word
            for text in (bare, f" {bare}"):
                ids = tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)
                if not ids:
                    raise InvalidRequest(f"sampling.bad_words[{index}]", "has no tokens")
                encoded[ids] = None
        return list(encoded)

    def _encode_chat(self, request: pb.GenerateRequest | pb.TokenizeRequest) -> IntArray:
        text = self.render(request.chat)
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def render(self, chat: pb.ChatPrompt) -> str:
        """The text of a conversation by the model's template. Raises InvalidRequest."""
        if not chat.messages:
            raise InvalidRequest("chat.messages", "at least one message is required")
        tools = tools_of(chat)
        variables = _object("chat.template_kwargs_json", chat.template_kwargs_json)
        reserved = RESERVED_VARIABLES.intersection(variables)
        if reserved:
            raise InvalidRequest("chat.template_kwargs_json", f"{', '.join(sorted(reserved))} can't be set here")
        return self._template.render(
            [_message(message) for message in chat.messages],
            tools or None,
            chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
            variables,
            self._config.template_timeout,
            self._config.max_prompt_bytes,
        )

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text


def tools_of(chat: pb.ChatPrompt) -> list[dict[str, Any]]:
    """The tools of a conversation. Raises InvalidRequest."""
    return [_object("chat.tools_json", text) for text in chat.tools_json]


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    extra = _object("chat.messages.extra_json", message.extra_json)
    if taken := sorted({"role", "content"} & extra.keys()):
        raise InvalidRequest("chat.messages.extra_json", f"{', '.join(taken)} can't be set here")
    return {"role": message.role, "content": message.content, **extra}


def _object(field: str, text: str) -> dict[str, Any]:
    """Parses a JSON object; no text is an empty one."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(field, "must be a JSON object")
    return value
