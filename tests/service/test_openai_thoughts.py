"""A model that thinks first, behind the real gateway: the form that was asked for is that of its answer.

Frontend and gateway are real; the core is a script that thinks, answers and ends, each token as soon as its mask is
there.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from shared.pb import core_pb2
from tests.frontend.fake_core import FakeCore, stopped, until
from tests.frontend.harness import serving
from tests.frontend.model_folder import CHAT_TEMPLATE, make_model_folder
from tests.patience import PATIENCE_S
from tests.service.test_openai import gateway_before, openai

EOS = 400
OPENING = "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "schema": (
        '{"a": 1}',
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    ),
    "required": ('[{"name": "f", "parameters": {"a": 1}}]', {"tools": TOOLS, "tool_choice": "required"}),
    "named": ('{"a": 1}', {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}),
}


@pytest.fixture(scope="module")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its template opens the thought, as those of models do that always think."""
    assert OPENING in CHAT_TEMPLATE
    template = CHAT_TEMPLATE.replace(OPENING, OPENING.replace("assistant\\n", "assistant\\n<think>\\n"))
    for mark in ("{%- generation %}", "{%- endgeneration %}"):  # of transformers alone
        template = template.replace(mark, "")
    return make_model_folder(tmp_path_factory.mktemp("models") / "thinking", chat_template=template)


async def say(core: FakeCore, submit: core_pb2.Submit, tokens: list[int]) -> None:
    for count, token in enumerate([*tokens, EOS], 1):
        await until(lambda count=count: sum(mask.handle == submit.handle for mask in core.masks) == count)
        core.give(submit, [token], stopped(EOS) if token == EOS else None, cached_tokens=0)


async def ask(client: Any, **options: Any) -> Any:
    """The only choice. The gateway needs a moment to find its engine."""
    messages = [{"role": "user", "content": "Hi"}]
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                answer = await client.chat.completions.create(model="thinking", messages=messages, **options)
                return answer.choices[0]
            except (openai.APIConnectionError, openai.NotFoundError, openai.InternalServerError):
                await asyncio.sleep(0.1)


def test_the_answer_after_a_thought_has_the_form_that_was_asked_for(thinking_model: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(thinking_model / "tokenizer.json"))

    async def scenario() -> None:
        async with serving(thinking_model) as served:
            endpoint = f"127.0.0.1:{served.frontend.port}"
            with gateway_before(tmp_path / "gateway", endpoint) as (http, _):
                url = f"http://127.0.0.1:{http}/v1"
                async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=20) as client:
                    for number, (kind, (answer, asked)) in enumerate(ASKED.items(), 1):
                        asking = asyncio.create_task(ask(client, **asked))
                        await until(lambda number=number: len(served.core.submits) == number)
                        await say(served.core, served.core.submits[-1], tokenizer.encode(f"hm\n</think>{answer}").ids)
                        check(kind, answer, await asking)

    asyncio.run(scenario())


def check(kind: str, answer: str, choice: Any) -> None:
    assert choice.message.reasoning_content.strip() == "hm"
    if kind == "schema":
        assert (choice.finish_reason, choice.message.content) == ("stop", answer)
    else:
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"a": 1})
