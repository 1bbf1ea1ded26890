"""OpenAI's bodies: what is understood, what is refused by name, what comes back."""

from dataclasses import replace
from typing import Any

import pytest

from shared.errors import DeadlineExceeded, InvalidRequest, LimitExceeded, RequestFailed
from tandem import Completion, EchoedPrompt, Finish, Sample, TokenLogprob, Usage
from tandem.batch.answers import error_of, response_of
from tandem.batch.bodies import work_of
from tandem.batch.request_lines import CHAT, RequestLine

TURNS = [{"role": "user", "content": "Hi"}]


def chat(**body: Any) -> RequestLine:
    return RequestLine("c", CHAT, {"messages": TURNS, **body})


def text(**body: Any) -> RequestLine:
    return RequestLine("t", "/v1/completions", {"prompt": "Hi", **body})


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def sample(index: int, text: str = "x", prompt_tokens: int = 5, completion_tokens: int = 3) -> Sample:
    return Sample(index, text, (1,), Finish("length", None), Usage(prompt_tokens, completion_tokens, 2))


def test_names_are_translated_and_null_is_unset() -> None:
    request = chat(
        model="tiny", max_completion_tokens=9, temperature=0, seed=-1, stop=["a"], n=2, top_p=None, user="me",
        chat_template_kwargs={"enable_thinking": False}, stream=False, frequency_penalty=0.5, tool_choice="auto",
        logit_bias={"11": -2}, logprobs=True, top_logprobs=3,
    )  # fmt: skip
    assert work_of(request, "tiny").options == {
        "max_tokens": 9, "temperature": 0, "seed": (1 << 64) - 1, "stop": ["a"], "n": 2,
        "template_kwargs": {"enable_thinking": False}, "frequency_penalty": 0.5, "logit_bias": {11: -2.0},
        "logprobs": 3, "tool_choice": "auto",
    }  # fmt: skip


def test_a_response_format_is_a_language() -> None:
    schema = {"type": "object"}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    assert work_of(chat(response_format=asked), "tiny").options == {"json_schema": schema}
    assert work_of(text(response_format={"type": "json_object"}), "tiny").options == {"json_object": True}
    assert work_of(chat(response_format={"type": "text"}), "tiny").options == {}
    assert work_of(text(regex="a+"), "tiny").options == {"regex": "a+"}


def test_logprobs_are_a_switch_in_chats_and_a_number_in_texts() -> None:
    assert work_of(chat(logprobs=True), "tiny").options == {"logprobs": 0}
    assert work_of(chat(logprobs=False), "tiny").options == {}
    assert work_of(text(logprobs=5, echo=True), "tiny").options == {"logprobs": 5, "echo": True}
    assert work_of(text(logprobs=0), "tiny").options == {"logprobs": 0}


def test_logprobs_come_back_in_openais_forms() -> None:
    likely = TokenLogprob(7, "é", (195, 169), -0.5, 1)
    tokens = (TokenLogprob(6, "ab", (97, 98), -1.5, 2, (likely,)), TokenLogprob(7, "é", (195, 169), -0.5, 1, (likely,)))
    prompt = EchoedPrompt("Hi ", (1, 2))
    completion = Completion("r", 1, (replace(sample(0, "abé"), logprobs=tokens),), prompt)
    (choice,) = response_of(chat(), "tiny", [completion])["response"]["body"]["choices"]
    top = {"token": "é", "logprob": -0.5, "bytes": (195, 169)}
    assert choice["logprobs"]["content"][0] == {
        "token": "ab", "logprob": -1.5, "bytes": (97, 98), "top_logprobs": [top],
    }  # fmt: skip
    (choice,) = response_of(text(), "tiny", [completion])["response"]["body"]["choices"]
    assert choice["text"] == "Hi abé"
    assert choice["logprobs"] == {
        "tokens": ["ab", "é"], "token_logprobs": [-1.5, -0.5], "top_logprobs": [{"é": -0.5}] * 2, "text_offset": [3, 5],
    }  # fmt: skip


def test_content_in_parts_is_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turns = [{"role": "system", "content": parts, "name": "x"}, {"role": "assistant", "content": None}]
    (messages,) = work_of(chat(messages=turns), "tiny").prompts
    assert messages == [{"role": "system", "content": "ab", "name": "x"}, {"role": "assistant", "content": None}]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ("a",)), ([1, 2], ([1, 2],)), (["a", "b"], ("a", "b")), ([[1], [2, 3]], ([1], [2, 3])), ([], ([],))],
)
def test_a_prompt_is_text_or_ids_or_several(prompt: Any, prompts: Any) -> None:
    assert work_of(text(prompt=prompt), "tiny").prompts == prompts


@pytest.mark.parametrize(
    ("request_line", "field"),
    [
        (chat(stream=True), "stream"),
        (chat(logprobs=3), "logprobs"),
        (chat(top_logprobs=3), "top_logprobs"),
        (text(top_logprobs=3, logprobs=2), "top_logprobs"),
        (chat(logit_bias={"a": 1}), "logit_bias"),
        (chat(logit_bias=[1]), "logit_bias"),
        (chat(echo=True), "echo"),
        (text(tool_choice="required"), "tool_choice"),
        (chat(response_format={"type": "json_schema", "json_schema": {}}), "response_format"),
        (text(response_format="json"), "response_format"),
        (chat(tempreature=1), "tempreature"),
        (chat(prompt="x"), "prompt"),
        (chat(messages=[]), "messages"),
        (chat(messages="Hi"), "messages"),
        (chat(messages=[{"content": "Hi"}]), "messages[0]"),
        (chat(messages=[*TURNS, {"role": "user", "content": [{"type": "image_url"}]}]), "messages[1].content"),
        (chat(model="gpt"), "model"),
        (text(prompt=None), "prompt"),
        (text(prompt=7), "prompt"),
        (text(messages=TURNS), "messages"),
        (text(suffix="x"), "suffix"),
        (text(tools=[]), "tools"),
        (chat(tools={"type": "function"}), "tools"),
        (chat(tools=[{"type": "function"}]), "tools[0]"),
        (chat(tools=[tool("f"), {**tool("g"), "type": "custom"}]), "tools[1]"),
        (chat(tools=[tool("")]), "tools[0]"),
        (chat(tools=[tool("f"), tool("g"), tool("f")]), "tools[2].function.name"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(request_line: RequestLine, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        work_of(request_line, "tiny")
    assert error.value.field == field


def test_a_completion_is_openais() -> None:
    line = response_of(chat(n=2), "tiny", [Completion("r", 1, (sample(0, "a"), sample(1, "b")))])
    assert (line["custom_id"], line["error"], line["response"]["status_code"]) == ("c", None, 200)
    body = line["response"]["body"]
    assert (body["id"], body["object"], body["model"]) == ("chatcmpl-r", "chat.completion", "tiny")
    assert [choice["message"]["content"] for choice in body["choices"]] == ["a", "b"]
    assert [(choice["index"], choice["finish_reason"]) for choice in body["choices"]] == [(0, "length"), (1, "length")]
    assert body["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def choice_of(text: str, **body: Any) -> dict[str, Any]:
    """Of a chat whose sample ended by itself."""
    ended = replace(sample(0, text), finish=Finish("stop", 7))
    (choice,) = response_of(chat(**body), "tiny", [Completion("r", 1, (ended,))])["response"]["body"]["choices"]
    return choice


def test_calls_of_tools_are_openais() -> None:
    choice = choice_of(f"{CALL}\n{CALL}", tools=[{}])
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    first, second = choice["message"]["tool_calls"]
    assert first["id"] != second["id"] and first["type"] == "function"
    assert first["function"] == second["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert len(choice_of(f"{CALL}\n{CALL}", tools=[{}], parallel_tool_calls=False)["message"]["tool_calls"]) == 1
    assert choice_of(f"Well: {CALL}", tools=[{}])["message"]["content"] == "Well:"


@pytest.mark.parametrize("body", [{}, {"tools": []}, {"tools": [{}], "tool_choice": "none"}])
def test_where_nothing_may_be_called_a_call_is_text(body: dict[str, Any]) -> None:
    choice = choice_of(CALL, **body)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", CALL)
    assert "tool_calls" not in choice["message"]


def test_a_thought_is_told_apart_from_the_answer() -> None:
    message = choice_of("<think>\nhm\n</think>\n\nYes.")["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "hm")


def test_several_prompts_are_choices_of_one_completion() -> None:
    line = response_of(text(), "tiny", [Completion("r", 1, (sample(0, "a"),)), Completion("s", 1, (sample(0, "b"),))])
    body = line["response"]["body"]
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "a"), (1, "b")]
    assert (body["object"], body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (
        "text_completion", 10, 6,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "status", "kind", "param"),
    [
        (InvalidRequest("stop", "too long"), 400, "invalid_request_error", "stop"),
        (InvalidRequest("model", "unknown"), 404, "invalid_request_error", "model"),
        (LimitExceeded("too long a message"), 400, "invalid_request_error", None),
        (DeadlineExceeded("late"), 504, "timeout", None),
        (RequestFailed("NaN"), 500, "server_error", None),
    ],
)
def test_an_error_is_a_line_too(error: Any, status: int, kind: str, param: str | None) -> None:
    line = error_of(chat(), error)
    assert (line["custom_id"], line["error"], line["response"]["status_code"]) == ("c", None, status)
    told = line["response"]["body"]["error"]
    assert (told["type"], told["param"], told["message"]) == (kind, param, str(error))


@pytest.mark.parametrize(
    ("body", "field", "problem", "param", "told"),
    [
        ({}, "sampling.temperature", "must be within [0, 2]", "temperature", "must be within [0, 2]"),
        ({"max_completion_tokens": 0}, "stopping.max_tokens", "too few", "max_completion_tokens", "too few"),
        ({"max_tokens": 0}, "stopping.max_tokens", "too few", "max_tokens", "too few"),
        ({"top_logprobs": 99}, "output.logprobs", "too many", "top_logprobs", "too many"),
        ({}, "constraint.tool_choice", "chat.tools_json has no tool", "tool_choice", "tools has no tool"),
        ({}, "constraint.tool_choice.function", "not in chat.tools_json", "tool_choice", "not in tools"),
        ({}, "chat.tools_json[1]", "not JSON", "tools[1]", "not JSON"),
        ({}, "constraint.json_schema", "not JSON", "response_format", "not JSON"),
        ({}, "constraint.choice.choices[3]", "must not be empty", "choice[3]", "must not be empty"),
        ({}, "chat.messages.extra_json", "role can't be set here", "messages", "role can't be set here"),
        ({}, "chat.template_kwargs_json", "tools can't", "chat_template_kwargs", "tools can't"),
        ({}, "chat", "has 9 tokens", "messages", "has 9 tokens"),
        ({}, "token_ids[7]", "is 1024", "prompt", "is 1024"),
        (
            {},
            "output_token_ids[0]",
            "constraint.regex does not allow it",
            "output_token_ids[0]",
            "regex does not allow it",
        ),
        ({}, "n", "output must be text", "n", "output must be text"),
    ],
)
def test_an_error_names_fields_of_the_body(
    body: dict[str, Any], field: str, problem: str, param: str, told: str
) -> None:
    error = error_of(chat(**body), InvalidRequest(field, problem))["response"]["body"]["error"]
    assert (error["param"], error["message"]) == (param, f"{param}: {told}")
