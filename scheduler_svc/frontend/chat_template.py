"""The model's own chat template: Jinja in a sandbox, as transformers' apply_chat_template renders it.

Knows nothing of tokens or gRPC. The template is the model's and the conversation the client's: whatever goes wrong
while they meet is an error of the request, and rendering is bounded in time and size.
"""

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser

from scheduler_svc.frontend.template_sandbox import Budget, TemplateSandbox, bounded, budget
from shared.errors import InvalidRequest, StartupError

RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "_tick"})
MOST_INDENT = 16
MOST_WORK = 16
"""Times the longest prompt: how much text a template may make on its way to one."""
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """Renders conversations. Safe to use from several threads."""

    def __init__(self, sources: dict[str, str], special_tokens: dict[str, str]) -> None:
        """`sources` by name: `default`, and perhaps `tool_use` for requests with tools. Raises StartupError."""
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise StartupError(f"the model's chat template does not parse: line {error.lineno}: {error}") from None
        self._special_tokens = special_tokens

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        add_generation_prompt: bool,
        variables: dict[str, Any],
        timeout: float,
        max_bytes: int,
    ) -> str:
        """The prompt's text. Takes at most `timeout` seconds. Raises InvalidRequest with the template's message."""
        template = self._template(with_tools=tools is not None)
        given = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        budget.set(Budget(timeout, MOST_WORK * max_bytes))
        pieces = template.generate(**{**self._special_tokens, **variables, **given})
        try:
            return _join(pieces, max_bytes)
        except InvalidRequest:
            raise
        except Exception as error:  # a template may raise anything that Python's operators raise
            raise InvalidRequest("chat", f"the model's chat template refuses it: {error}") from None

    def _template(self, with_tools: bool) -> jinja2.Template:
        names = ("tool_use", "default") if with_tools else ("default",)
        template = next((self._templates[name] for name in names if name in self._templates), None)
        if template is None:
            raise InvalidRequest("chat", "the served model has no chat template; send text or token ids")
        return template


def _join(pieces: Iterator[str], max_bytes: int) -> str:
    text, size = [], 0
    for piece in pieces:
        text.append(piece)
        size += len(piece.encode())
        if size > max_bytes:
            raise InvalidRequest("chat", f"renders to more than {max_bytes} bytes")
    return "".join(text)


def load_chat_template(folder: Path) -> ChatTemplate:
    """Reads chat_template.jinja, or else tokenizer_config.json's chat_template. Raises StartupError."""
    path = folder / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        special = {name: _content(config[name]) for name in _SPECIAL_TOKENS if config.get(name)}
        return ChatTemplate(_sources(folder, config.get("chat_template")), special)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise StartupError(f"{path}: {error}") from None


def _sources(folder: Path, configured: Any) -> dict[str, str]:
    file = folder / "chat_template.jinja"
    if file.exists():
        return {"default": file.read_text(encoding="utf-8")}
    if isinstance(configured, list):
        return {entry["name"]: entry["template"] for entry in configured}
    return {"default": configured} if configured else {}


def _content(token: Any) -> str:
    """A special token is given as text or as the description of an added token."""
    return str(token["content"] if isinstance(token, dict) else token)


def _environment() -> TemplateSandbox:
    environment = TemplateSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, _LoopTicks, loopcontrols]
    )
    environment.filters["tojson"] = bounded("tojson", _tojson)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a model was never trained on."""
    if (indent or 0) > MOST_INDENT or len("".join(separators or ())) > MOST_INDENT:
        raise jinja2.TemplateRuntimeError(f"tojson indents and separates by at most {MOST_INDENT} characters")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _GenerationBlocks(Extension):
    """`{% generation %}` marks the assistant's part for training: here just a scope."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _LoopTicks(Extension):
    """Calls `_tick` first in the body of each loop: the only place where rendering could run on without end."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        opens_loop, previous = False, ""
        for token in stream:
            yield token
            if previous == "block_begin":
                opens_loop = token.type == "name" and token.value == "for"
            if token.type == "block_end" and opens_loop:
                opens_loop = False
                yield Token(token.lineno, "variable_begin", "{{")
                yield Token(token.lineno, "name", "_tick")
                yield Token(token.lineno, "lparen", "(")
                yield Token(token.lineno, "rparen", ")")
                yield Token(token.lineno, "variable_end", "}}")
            previous = token.type
