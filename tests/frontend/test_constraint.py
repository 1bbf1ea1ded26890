"""Constrained requests at the frontend: masks for the core, in order; compilation that bothers nobody."""

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc import aio
from tokenizers import Tokenizer

from shared.pb import core_pb2
from shared.pb import generation_pb2 as pb
from tests.frontend.fake_core import failed, length, stopped, until
from tests.frontend.harness import Served, collect, rest, run, serving

EOS = 400
SLOW = json.dumps({"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{10 + i}}}"} for i in range(50)]})
"""Two kilobytes that compile for minutes."""


def _request(constraint: pb.Constraint, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="The", constraint=constraint, **fields)


def _texts(mask: core_pb2.MaskReady, tokenizer: Tokenizer) -> set[str]:
    """The allowed tokens that are one ASCII character, and the end."""
    known = {tokenizer.token_to_id(chr(code)): chr(code) for code in range(33, 127)} | {EOS: "end"}
    return {text for token, text in known.items() if mask.allowed[token // 8] >> token % 8 & 1}


async def _mask(served: Served, count: int) -> core_pb2.MaskReady:
    await until(lambda: len(served.core.masks) == count)
    return served.core.masks[-1]


def _checkers() -> list[psutil.Process]:
    found = []
    for child in psutil.Process(os.getpid()).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one, too
            if "grammar_check" in " ".join(child.cmdline()):
                found.append(child)
    return found


def test_each_token_brings_the_mask_for_the_next(model: Path, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            call = served.stub.Generate(_request(pb.Constraint(regex="a(b|c)+"), stopping={"min_tokens": 3}))
            (submit,) = await served.core.submitted()
            assert (submit.constrained, submit.min_tokens) == (True, 0)
            seen = []
            for count, token in enumerate("abc", 1):
                mask = await _mask(served, count)
                assert (mask.handle, mask.position) == (submit.handle, count - 1)
                seen.append(_texts(mask, tokenizer))
                served.core.give(submit, [tokenizer.token_to_id(token)])
            seen.append(_texts(await _mask(served, 4), tokenizer))
            assert seen == [{"a"}, {"b", "c"}, {"b", "c"}, {"b", "c", "end"}], "min_tokens keeps the end away"
            served.core.give(submit, [EOS], stopped(EOS))
            assert "".join(response.text for response in await rest(call)) == "abc"
            assert len(served.core.masks) == 4, "no mask after the end"

    run(scenario())


def test_a_new_core_gets_the_mask_again_without_a_replay(model: Path, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            call = served.stub.Generate(_request(pb.Constraint(regex="ab?c")))
            (submit,) = await served.core.submitted()
            served.core.give(submit, [tokenizer.token_to_id("a")])
            before = await _mask(served, 2)
            served.core.die()
            await until(lambda: served.frontend.link.state is None)
            await served.core.start()
            (again,) = (await served.core.submitted(2))[-1:]
            after = await _mask(served, 3)
            assert (after.position, after.allowed) == (1, before.allowed)
            assert (again.constrained, after.handle) == (True, again.handle)
            served.core.give(again, [tokenizer.token_to_id("c")])
            assert _texts(await _mask(served, 4), tokenizer) == {"end"}
            served.core.give(again, [EOS], stopped(EOS))
            assert "".join(response.text for response in await rest(call)) == "ac"

    run(scenario())


def test_output_that_was_given_is_replayed(model: Path, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            given = [tokenizer.token_to_id(text) for text in "ab"]
            wanted = _request(pb.Constraint(regex="ab(x|y)"), output_token_ids=pb.TokenIds(ids=given))
            call = served.stub.Generate(wanted)
            mask = await _mask(served, 1)
            assert (mask.position, _texts(mask, tokenizer)) == (2, {"x", "y"})
            call.cancel()
            await served.idle()
            wanted.constraint.regex = "a[0-9]+"
            with pytest.raises(aio.AioRpcError, match=r"output_token_ids\[1\]: constraint.regex does not allow it"):
                await collect(served.stub.Generate(wanted))

    run(scenario())


THOUGHT = "so<think>\n"


def test_a_grammar_begins_after_the_thought_that_the_prompt_has_opened(model: Path, tokenizer: Tokenizer) -> None:
    """Whatever may come before, but no end. Both samples, a core that takes over and a client that resumes agree."""
    think_end, wanted = tokenizer.token_to_id("</think>"), pb.GenerateRequest(text=THOUGHT, constraint={"regex": "ab"})

    async def scenario() -> None:
        async with serving(model) as served:
            wanted.n = 2
            call = served.stub.Generate(wanted)
            one, other = await served.core.submitted(2)
            everything = {*map(chr, range(33, 127))}
            assert [_texts(mask, tokenizer) for mask in [await _mask(served, 2), served.core.masks[0]]] == [
                everything
            ] * 2
            served.core.give(one, [tokenizer.token_to_id("z")])
            assert _texts(await _mask(served, 3), tokenizer) == everything
            served.core.give(one, [think_end])
            assert _texts(await _mask(served, 4), tokenizer) == {"a"}
            served.core.give(other, [tokenizer.token_to_id("b")])
            assert _texts(await _mask(served, 5), tokenizer) == everything
            call.cancel()
            await served.idle()
            wanted.n = 1
            for given, allowed in (("z", everything), ("z</think>", {"a"}), ("</think>a", {"b"})):
                wanted.output_token_ids.ids[:] = tokenizer.encode(given).ids
                count = len(served.core.masks)
                call = served.stub.Generate(wanted)
                assert _texts(await _mask(served, count + 1), tokenizer) == allowed
                call.cancel()
                await served.idle()

    run(scenario())


@pytest.mark.parametrize(
    ("prompt", "constraint"),
    [
        ("The <think> tag", {}),
        (f"{THOUGHT}\n</think>\n\n", {}),
        ("\n", {}),
        (THOUGHT, {"enable_in_reasoning": True}),
    ],
)
def test_without_an_open_thought_a_grammar_begins_at_once(
    model: Path, tokenizer: Tokenizer, prompt: str, constraint: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            call = served.stub.Generate(pb.GenerateRequest(text=prompt, constraint={"regex": "ab", **constraint}))
            assert _texts(await _mask(served, 1), tokenizer) == {"a"}
            call.cancel()

    run(scenario())


def test_samples_have_matchers_of_their_own(model: Path, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            call = served.stub.Generate(_request(pb.Constraint(regex="ax|by"), n=2))
            one, other = await served.core.submitted(2)
            assert all(_texts(mask, tokenizer) == {"a", "b"} for mask in [await _mask(served, 2), served.core.masks[0]])
            served.core.give(one, [tokenizer.token_to_id("a")])
            assert _texts(await _mask(served, 3), tokenizer) == {"x"}
            served.core.give(other, [tokenizer.token_to_id("b")])
            assert _texts(await _mask(served, 4), tokenizer) == {"y"}
            for submit in (one, other):
                served.core.give(submit, [], length())
            await rest(call)

    run(scenario())


def test_a_client_that_leaves_while_a_mask_is_made(model: Path, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            call = served.stub.Generate(_request(pb.Constraint(regex="a+")))
            (submit,) = await served.core.submitted()
            served.core.give(submit, [tokenizer.token_to_id("a")])
            call.cancel()
            await until(lambda: served.core.cancelled == [submit.handle])

    run(scenario())


def test_a_grammar_that_leads_nowhere_ends_its_request_alone(model: Path, tokenizer: Tokenizer) -> None:
    grammar = 'start: "a" NEVER\nNEVER: /[^\\s\\S]/'

    async def scenario() -> None:
        async with serving(model) as served:
            call = served.stub.Generate(_request(pb.Constraint(grammar=grammar)))
            (submit,) = await served.core.submitted()
            served.core.give(submit, [tokenizer.token_to_id("a")])
            assert (await call.read()).text == "a", "what there is comes first"
            with pytest.raises(aio.AioRpcError, match="stopped after 1 output tokens: no text is left"):
                await rest(call)

    run(scenario())


def test_a_token_that_no_mask_allowed_is_noticed(model: Path, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            call = served.stub.Generate(_request(pb.Constraint(regex="a+")))
            (submit,) = await served.core.submitted()
            served.core.give(submit, [tokenizer.token_to_id("z")])
            with pytest.raises(aio.AioRpcError) as error:
                await rest(call)
            assert error.value.code() == grpc.StatusCode.INTERNAL

    run(scenario())


def test_a_grammar_that_compiles_for_minutes_is_refused_and_bothers_nobody(model: Path, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with serving(model, grammar_timeout=1.5) as served:
            slow = asyncio.create_task(collect(served.stub.Generate(_request(pb.Constraint(json_schema=SLOW)))))
            await until(lambda: served.frontend.service.live == 1)
            free = served.stub.Generate(pb.GenerateRequest(text="The"))
            other = served.stub.Generate(_request(pb.Constraint(regex="b")))
            submits = await served.core.submitted(2)
            assert not slow.done()
            for submit in submits:
                served.core.give(submit, [tokenizer.token_to_id("b")], length())
            assert [len(await rest(call)) for call in (free, other)] == [1, 1]
            with pytest.raises(aio.AioRpcError, match=r"constraint\.json_schema: takes longer than 1\.5 s") as error:
                await slow
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            await until(lambda: len(_checkers()) == 1)  # the one that was killed is gone
        await until(lambda: not _checkers())

    run(scenario())


def test_a_compilation_that_nobody_waits_for_is_ended(model: Path, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with serving(model, grammar_timeout=600) as served:
            for _ in range(3):
                call = served.stub.Generate(_request(pb.Constraint(json_schema=SLOW)))
                await until(lambda: any(child.cpu_times().user > 0.5 for child in _checkers()))
                call.cancel()
                await until(lambda: not _checkers())
            call = served.stub.Generate(_request(pb.Constraint(regex="b")))
            (submit,) = await served.core.submitted()
            served.core.give(submit, [tokenizer.token_to_id("b")], failed(1, "enough"))
            with pytest.raises(aio.AioRpcError, match="enough"):
                await rest(call)

    run(scenario())


def test_equal_grammars_are_compiled_once(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model, lambda submit: ((), length())) as served:
            calls = [served.stub.Generate(_request(pb.Constraint(regex="[ab]+"))) for _ in range(20)]
            await asyncio.gather(*map(collect, calls))
            assert 1 <= len(_checkers()) <= 2

    run(scenario())


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (_request(pb.Constraint(regex="(")), "constraint.regex: .*unclosed group"),
        (_request(pb.Constraint(regex="a"), stopping={"ignore_eos": True}), "stopping.ignore_eos: must be unset"),
        (
            _request(pb.Constraint(regex="a"), sampling={"allowed_token_ids": {"ids": [3]}}),
            "sampling.allowed_token_ids: must be unset",
        ),
        (_request(pb.Constraint(regex="a"), sampling={"bad_words": ["a"]}), "sampling.bad_words: must be empty"),
        (_request(pb.Constraint(tool_choice=pb.ToolChoice())), "chat.tools_json has no tool to call"),
    ],
)
def test_a_callers_mistake(wanted: pb.GenerateRequest, told: str, model: Path) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            with pytest.raises(aio.AioRpcError) as error:
                await collect(served.stub.Generate(wanted))
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert told.rpartition(".*")[2] in str(error.value.details())

    run(scenario())
