"""What the clients of a soak ask for: a set of requests of all kinds, each asked again and again. Knows no client."""

import random
from dataclasses import dataclass, field
from typing import Any

from tandem.requests import Prompt

TEXTS = (
    "It is a truth universally acknowledged",
    "Once upon a time there was",
    "The ship had been at sea for",
    "He looked at her and said",
)
LONG = " ".join(TEXTS) + " "
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]


@dataclass(frozen=True, slots=True)
class Kind:
    """One request, which always gives the same."""

    name: str
    prompt: Prompt
    options: dict[str, Any] = field(default_factory=dict)


def kinds() -> list[Kind]:
    """Requests of every kind, short ones: the same ones for every run."""
    made: list[Kind] = []
    for number, text in enumerate(TEXTS):
        seed = {"seed": number, "temperature": 0.8}
        chat = [{"role": "user", "content": text}]
        made += [
            Kind("greedy", text, {"temperature": 0.0, "max_tokens": 12}),
            Kind("sampled", text, {**seed, "top_p": 0.9, "top_k": 40, "max_tokens": 16}),
            Kind("long prompt", LONG * (2 + number), {**seed, "max_tokens": 6}),
            Kind("long output", text, {**seed, "max_tokens": 60, "ignore_eos": True}),
            Kind("penalties", text, {**seed, "presence_penalty": 0.7, "repetition_penalty": 1.3, "max_tokens": 12}),
            Kind("biases", text, {**seed, "logit_bias": {300: 3.0}, "bad_words": ["the"], "max_tokens": 12}),
            Kind("logprobs", text, {**seed, "logprobs": 3, "prompt_logprobs": 1, "max_tokens": 10}),
            Kind("samples", text, {**seed, "n": 3, "max_tokens": 8}),
            Kind("stop string", text, {**seed, "stop": ["e", "a"], "max_tokens": 30}),
            Kind("chat", chat, {**seed, "max_tokens": 12}),
            Kind("regex", text, {**seed, "regex": "[a-z]{3,9} [0-9]{2}", "max_tokens": 16}),
            Kind("choice", text, {**seed, "choice": ["yes", "no", "maybe"], "max_tokens": 8}),
            Kind("JSON schema", text, {**seed, "json_schema": SCHEMA, "max_tokens": 16}),
            Kind("tools", chat, {**seed, "tools": TOOLS, "tool_choice": "required", "max_tokens": 40}),
        ]
    return made


FATES = ("read",) * 15 + ("aborted", "left", "late", "slow")
"""What becomes of a request, one of these: read to its end, at once or slowly; aborted, left or late in its midst."""


def fate(random_source: random.Random) -> str:
    """Of one request."""
    return random_source.choice(FATES)
