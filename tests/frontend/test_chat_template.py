"""The chat template against transformers' apply_chat_template, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from scheduler_svc.frontend.chat_template import ChatTemplate, load_chat_template
from scheduler_svc.frontend.config import FrontendConfig
from scheduler_svc.frontend.prompts import Prompts
from shared.errors import InvalidRequest, StartupError
from shared.pb import generation_pb2 as pb
from tests.frontend.harness import run
from tests.frontend.model_folder import CHAT_TEMPLATE, make_model_folder

_USER = {"role": "user", "content": "What is 2 < 3 & 'so' on?  日本 🙂\n"}
_SYSTEM = {"role": "system", "content": "Be brief."}
_WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells <the> weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"maximum": 3.5}}},
    },
}
_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2, "exact": 1.0}}}
_CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one turn": ([_USER], {}),
    "system": ([_SYSTEM, _USER], {}),
    "several turns": ([_USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}, _USER], {}),
    "no thinking": ([_USER], {"enable_thinking": False}),
    "thinking": ([_USER], {"enable_thinking": True}),
    "no generation prompt": ([_USER, {"role": "assistant", "content": "Yes."}], {"add_generation_prompt": False}),
    "reasoning": (
        [_USER, {"role": "assistant", "content": "Yes.", "reasoning_content": "\n2 is less\n"}],
        {"add_generation_prompt": False},
    ),
    "tools": ([_SYSTEM, _USER], {"tools": [_WEATHER, {"type": "function", "function": {"name": "b", "a": 1}}]}),
    "tool calls": (
        [
            _USER,
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": '{"sky": "grey"}'},
            {"role": "assistant", "content": "Grey.", "tool_calls": [{"name": "f", "arguments": '{"x": 1}'}]},
        ],
        {"tools": [_WEATHER]},
    ),
}


def _chat(messages: list[dict[str, Any]], **options: Any) -> pb.ChatPrompt:
    """The request that a client makes of these arguments of apply_chat_template."""
    chat = pb.ChatPrompt()
    for message in messages:
        extra = {key: value for key, value in message.items() if key not in ("role", "content")}
        chat.messages.add(role=message["role"], content=message["content"], extra_json=json.dumps(extra))
    chat.tools_json.extend(json.dumps(tool) for tool in options.pop("tools", ()))
    if "add_generation_prompt" in options:
        chat.add_generation_prompt = options.pop("add_generation_prompt")
    chat.template_kwargs_json = json.dumps(options)
    return chat


@pytest.mark.parametrize("name", _CONVERSATIONS)
def test_renders_and_tokenizes_as_transformers_does(name: str, model: Path) -> None:
    messages, options = _CONVERSATIONS[name]
    reference = AutoTokenizer.from_pretrained(model)
    prompts = Prompts(FrontendConfig(model, Path("unused")))
    expected = {"add_generation_prompt": True, **options}
    text = reference.apply_chat_template(messages, tokenize=False, **expected)
    assert prompts.render(_chat(messages, **options)) == text

    async def scenario() -> None:
        ids = await prompts.encode(pb.GenerateRequest(chat=_chat(messages, **options)))
        assert ids.tolist() == reference.apply_chat_template(messages, return_dict=False, **expected)

    run(scenario())


@pytest.mark.parametrize("text", ["plain", "<|im_start|>user\nspecial", " leading", "日本語 🙂"])
def test_plain_text_is_tokenized_as_transformers_does(text: str, model: Path) -> None:
    prompts = Prompts(FrontendConfig(model, Path("unused")))

    async def scenario() -> None:
        ids = await prompts.encode(pb.GenerateRequest(text=text))
        assert ids.tolist() == AutoTokenizer.from_pretrained(model)(text)["input_ids"]

    run(scenario())


def _render(source: str, variables: dict[str, Any] | None = None, max_bytes: int = 10_000) -> str:
    template = ChatTemplate({"default": source}, {"bos_token": "<s>"})
    return template.render([{"role": "user", "content": "hi"}], None, True, variables or {}, 0.1, max_bytes)


def test_special_tokens_and_further_variables_are_there() -> None:
    assert _render("{{ bos_token }}{{ mood }}{{ messages[0].content }}", {"mood": "!"}) == "<s>!hi"


def test_loop_controls_and_the_clock_are_there() -> None:
    assert _render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert _render("{{ strftime_now('%Y') }}").isdigit()


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].missing.key }}", "missing"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ ().__class__.__base__ }}", "__class__"),
        ("{{ messages.append(1) }}", "append"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "longer than 0.1 s"),
        ("{% for i in range(9999) %}xxxxxxxxxx{% endfor %}", "more than 10000 bytes"),
    ],
)
def test_whatever_goes_wrong_is_the_requests_error_with_its_message(source: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        _render(source)


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, chat_template=None)
    with pytest.raises(InvalidRequest, match="no chat template"):
        Prompts(FrontendConfig(folder, Path("unused"))).render(_chat([_USER]))


def test_a_template_file_beside_the_tokenizer_counts(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, chat_template="from the configuration")
    (folder / "chat_template.jinja").write_text("from the file", encoding="utf-8")
    assert load_chat_template(folder).render([_USER], None, True, {}, 1, 100) == "from the file"


def test_named_templates_are_chosen_as_transformers_chooses(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    template = load_chat_template(make_model_folder(tmp_path, chat_template=named))
    assert template.render([_USER], None, True, {}, 1, 100) == "plain"
    assert template.render([_USER], [_WEATHER], True, {}, 1, 100) == "with tools"


def test_a_template_that_does_not_parse_stops_the_start_with_one_line(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="line 2"):
        load_chat_template(make_model_folder(tmp_path, chat_template="{{ 1 }}\n{% for %}"))


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        (pb.ChatPrompt(), "chat.messages"),
        (pb.ChatPrompt(messages=[pb.ChatMessage(role="alien", content="x")]), "unknown role: alien"),
        (pb.ChatPrompt(messages=[pb.ChatMessage(role="user", extra_json="[1]")]), "extra_json: must be a JSON object"),
        (
            pb.ChatPrompt(messages=[pb.ChatMessage(role="user", extra_json='{"role": "system"}')]),
            "extra_json: role can't",
        ),
        (pb.ChatPrompt(messages=[pb.ChatMessage(role="user")], tools_json=["{"]), "tools_json: not JSON"),
        (pb.ChatPrompt(messages=[pb.ChatMessage(role="user")], tools_json=['{"a":' * 50_000]), "tools_json: not JSON"),
        (
            pb.ChatPrompt(messages=[pb.ChatMessage(role="user")], template_kwargs_json='{"messages": []}'),
            "messages can't be set",
        ),
    ],
)
def test_malformed_chats_are_refused_by_field(chat: pb.ChatPrompt, field: str, model: Path) -> None:
    with pytest.raises(InvalidRequest, match=field):
        Prompts(FrontendConfig(model, Path("unused"))).render(chat)


def test_trailing_whitespace_of_the_template_matters_as_in_transformers(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, chat_template=CHAT_TEMPLATE + "end\n")
    text = AutoTokenizer.from_pretrained(folder).apply_chat_template([_USER], tokenize=False)
    assert Prompts(FrontendConfig(folder, Path("unused"))).render(_chat([_USER], add_generation_prompt=False)) == text
