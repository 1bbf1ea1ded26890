"""Logprobs, echo and which text is shown: each token's once, with its token, whatever is held back or starts again."""

import struct
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from scheduler_svc.frontend import logprobs as frontend_logprobs
from shared.pb import core_pb2
from shared.pb import generation_pb2 as pb
from tests.frontend.fake_core import ids, length, pack_ints, until
from tests.frontend.harness import collect, rest, run, serving
from tests.frontend.model_folder import make_model_folder


def _entry(number: int, *top: int) -> bytes:
    """Rank `number` and logprob -`number`; of the likely tokens, -1, -2 ..."""
    pairs = b"".join(struct.pack("<if", token, -place) for place, token in enumerate(top, 1))
    return struct.pack("<fi", -number, number) + pairs


def _batch(*tokens: tuple[core_pb2.Submit, int, bytes]) -> core_pb2.TokenBatch:
    return core_pb2.TokenBatch(
        handles=pack_ints(submit.handle for submit, _, _ in tokens),
        token_ids=pack_ints(token for _, token, _ in tokens),
        logprob_sizes=pack_ints(len(entry) for _, _, entry in tokens),
        logprobs=b"".join(entry for _, _, entry in tokens),
    )


def _asking(text: str = "The quick", **output: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, output=pb.OutputParams(**output))


def test_each_token_comes_with_its_own_logprobs(model: Path, tokenizer: Tokenizer) -> None:
    """Two requests in every batch, of different sizes; one ends by its stop string while tokens are on their way."""
    fox = tokenizer.encode("fox jumps 🙂 over").ids

    async def scenario() -> None:
        async with serving(model) as served:
            stopping = _asking(logprobs=2)
            stopping.stopping.stop.append("jum")
            ending, going_on = served.stub.Generate(stopping), served.stub.Generate(_asking(logprobs=0))
            first, second = await served.core.submitted(2)
            if not first.sampling.logprobs:
                first, second = second, first
            for number, token in enumerate(fox, 1):
                tokens = [(first, token, _entry(number, 3, 4)), (second, token, _entry(number))]
                served.core.send_batch(_batch(*tokens))
            served.core.give(second, [], length())
            for call, num_top in ((ending, 2), (going_on, 0)):
                responses = await collect(call)
                told = [entry for response in responses for entry in response.logprobs]
                tokens = [token for response in responses for token in response.token_ids]
                assert all(len(response.logprobs) == len(response.token_ids) for response in responses)
                assert [entry.token_id for entry in told] == tokens == fox[: len(tokens)]
                assert [(entry.rank, entry.logprob) for entry in told] == [(n, -n) for n in range(1, len(told) + 1)]
                assert all([top.token_id for top in entry.top_logprobs] == [3, 4][:num_top] for entry in told)
            assert b"".join(entry.bytes for entry in told).decode() == "fox jumps 🙂 over"
            assert any("�" in entry.text for entry in told), "half a character has bytes of its own"

    run(scenario())


def test_logprobs_of_the_prompt_precede_the_output_in_pieces(
    model: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontend_logprobs, "MOST_PROMPT_TOKENS", 3)
    prompt = tokenizer.encode("She sells sea shells <|im_end|>").ids

    async def scenario() -> None:
        async with serving(model) as served:
            call = served.stub.Generate(_asking("She sells sea shells <|im_end|>", prompt_logprobs=1, echo=True))
            (submit,) = await served.core.submitted()
            entries = b"".join(_entry(position, 7) for position in range(1, len(prompt)))
            told = core_pb2.PromptLogprobs(handle=submit.handle, entries=entries)
            batch = core_pb2.TokenBatch(handles=pack_ints([submit.handle]), token_ids=pack_ints([65]))
            batch.prompt_logprobs.append(told)
            served.core.send_batch(batch)
            served.core.give(submit, [], length())
            responses = await collect(call)
            got = [entry for response in responses for entry in response.prompt_logprobs]
            assert [entry.token_id for entry in got] == prompt
            assert not got[0].HasField("logprob") and [entry.rank for entry in got] == list(range(len(prompt)))
            assert b"".join(entry.bytes for entry in got).decode() == "She sells sea shells <|im_end|>"
            assert max(len(response.prompt_logprobs) for response in responses) == 3
            with_tokens = [number for number, response in enumerate(responses) if response.token_ids]
            assert not any(response.prompt_logprobs for response in responses[with_tokens[0] + 1 :])
            assert responses[0].echo == pb.EchoedPrompt(text="She sells sea shells ", token_ids=prompt)
            assert not any(response.HasField("echo") for response in responses[1:])

    run(scenario())


def test_a_prompt_of_one_token_and_an_output_without_logprobs(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model, lambda submit: ([65], length())) as served:
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[70]), output=pb.OutputParams(prompt_logprobs=2))
            responses = await collect(served.stub.Generate(request))
            got = [entry for response in responses for entry in response.prompt_logprobs]
            assert [(entry.token_id, entry.HasField("logprob")) for entry in got] == [(70, False)]
            assert not any(response.logprobs for response in responses)

    run(scenario())


def test_a_core_that_takes_over_is_told_what_came(model: Path, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("She sells sea shells").ids
    numbers = count(1)

    async def scenario() -> None:
        async with serving(model) as served:
            call = served.stub.Generate(_asking("She sells sea shells", prompt_logprobs=0, logprobs=0))
            (before,) = await served.core.submitted()
            assert before.prompt_logprobs_received == 0

            def tell(submit: core_pb2.Submit, how_many: int) -> None:
                entries = b"".join(_entry(next(numbers)) for _ in range(how_many))
                told = core_pb2.PromptLogprobs(handle=submit.handle, entries=entries)
                served.core.send_batch(core_pb2.TokenBatch(prompt_logprobs=[told]))

            tell(before, 2)
            first = await call.read()
            served.core.die()
            await until(lambda: served.frontend.link.state is None)
            await served.core.start()
            (after,) = (await served.core.submitted(2))[-1:]
            assert after.prompt_logprobs_received == 3
            tell(after, len(prompt) - 3)
            served.core.send_batch(_batch((after, 65, _entry(9))))
            served.core.give(after, [], length())
            responses = [first, *await rest(call)]
            got = [entry for response in responses for entry in response.prompt_logprobs]
            assert [(entry.token_id, entry.rank) for entry in got] == list(zip(prompt, range(len(prompt)), strict=True))
            assert [entry.rank for response in responses for entry in response.logprobs] == [9]

    run(scenario())


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ({}, "fox "),
        ({"include_stop_str_in_output": True}, "fox jum"),
        ({"skip_special_tokens": False}, "<|im_start|>fox "),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "<|im_start|>fox jum"),
    ],
)
def test_which_text_is_shown(model: Path, tokenizer: Tokenizer, output: dict[str, bool], expected: str) -> None:
    """What follows the stop string in its token is cut in any case."""
    tokens = tokenizer.encode("<|im_start|>fox jumps").ids

    async def scenario() -> None:
        async with serving(model, lambda submit: (tokens, None)) as served:
            request = _asking(**output)
            request.stopping.stop.append("jum")
            responses = await collect(served.stub.Generate(request))
            assert "".join(response.text for response in responses) == expected

    run(scenario())


@pytest.mark.parametrize(("include", "expected"), [(False, "a"), (True, "ab")])
def test_the_text_of_a_stop_token_is_shown_where_it_was_asked_for(
    model: Path, tokenizer: Tokenizer, include: bool, expected: str
) -> None:
    a, b = (tokenizer.token_to_id(letter) for letter in "ab")

    async def scenario() -> None:
        async with serving(model, lambda submit: ([a, b], core_pb2.Ended(stop_token_id=b))) as served:
            request = _asking(include_stop_str_in_output=include)
            request.stopping.stop_token_ids.append(b)
            responses = await collect(served.stub.Generate(request))
            assert "".join(response.text for response in responses) == expected
            assert [token for response in responses for token in response.token_ids] == [a, b]

    run(scenario())


def test_bad_words_are_tokenized_as_they_stand_in_a_text(model: Path, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with serving(model, lambda submit: ([65], length())) as served:
            request = _asking()
            request.sampling.bad_words.extend(["fox", " lazy dog", "\n"])
            await collect(served.stub.Generate(request))
            (submit,) = served.core.submits
            numbers = ids(submit.sampling.rules.bad_words)
            words = []
            while numbers:
                words.append(tokenizer.decode(numbers[1 : 1 + numbers[0]]))
                del numbers[: 1 + numbers[0]]
            assert words == ["fox", " fox", "lazy dog", " lazy dog", "\n", " \n"]

    run(scenario())


def test_a_repetition_penalty_may_come_from_the_generation_config(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    config = folder / "generation_config.json"
    config.write_text('{"repetition_penalty": 1.25, "eos_token_id": 398}')

    async def scenario() -> None:
        async with serving(folder, lambda submit: ([65], length())) as served:
            for sampling in ({}, {"repetition_penalty": 1.0}, {"presence_penalty": 0.5}):
                await collect(served.stub.Generate(pb.GenerateRequest(text="a", sampling=sampling)))
            silent, explicit, other = (submit.sampling for submit in served.core.submits)
            assert silent.rules.repetition_penalty == other.rules.repetition_penalty == 1.25
            assert not explicit.HasField("rules"), "nothing to do costs nothing"

    run(scenario())
