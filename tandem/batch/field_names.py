"""Errors of Tandem's own API in the names of OpenAI's bodies: who wrote a batch knows no others. Does no I/O."""

import re
from collections.abc import Mapping
from typing import Any

from shared.errors import InvalidRequest

_NAMES = (
    (r"\b(?:sampling|stopping|output)\.(?=[a-z])", ""),
    (r"\bchat\.tools_json\b", "tools"),
    (r"\bchat\.messages(?:\.extra_json)?\b", "messages"),
    (r"\bchat\.template_kwargs_json\b|^template_kwargs$", "chat_template_kwargs"),
    (r"\bconstraint\.json_(?:schema|object)\b|^(?:constraint|json_schema|json_object)$", "response_format"),
    (r"\bconstraint\.choice\.choices\b", "choice"),
    (r"\bconstraint\.tool_choice\.function\b", "tool_choice"),
    (r"\bconstraint\.(?=[a-z])", ""),
    (r"^chat$", "messages"),
    (r"^text$|^token_ids(?:\[\d+\])?$", "prompt"),
)
"""What to replace in a field and in what is said of it; what has ^ and $ is a whole field."""
_SPELLINGS = {"max_tokens": "max_completion_tokens", "logprobs": "top_logprobs"}
"""Of one option in chats, where the body has the second."""


def in_openais_names(error: InvalidRequest, body: Mapping[str, Any]) -> InvalidRequest:
    """The same error; `body` is that of the request."""
    field, problem = _renamed(error.field), _renamed(str(error).removeprefix(f"{error.field}: "))
    spelled = _SPELLINGS.get(field, field)
    return InvalidRequest(spelled if spelled in body else field, problem)


def _renamed(text: str) -> str:
    for pattern, name in _NAMES:
        text = re.sub(pattern, name, text)
    return text
