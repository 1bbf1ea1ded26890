"""Penalties, biases, forbidden and allowed tokens, logprobs, echo: through the running services, whatever dies.

The oracle is a naive computation on transformers' logits in float64, and the undisturbed run.
"""

import asyncio
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grpc import aio

from shared.logit_rules import LogitRules
from shared.logprobs import TokenEntry
from shared.pb import generation_pb2 as pb
from tandem import Client, InvalidRequest
from tandem.models import model_folder
from tests.patience import PATIENCE_S
from tests.service.losses import STEP_TIMEOUT_S, disturbed, kill
from tests.service.tandem_process import Output, Tandem, follow, generate_all, running, until_idle
from tests.worker.rules_oracle import adjusted, assert_near, entry_of

PROMPT = "It is a truth universally acknowledged, that a single man"
STRANGE = "Seven green computers sang, and sang, and"
"""What the model can't know by heart."""
COUNT = 40
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "sampling.md"
VOCABULARY = 1536


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tandem]:
    arguments = ["--dtype", "float64", "--kv-cache-memory", "64", "--step-timeout", str(STEP_TIMEOUT_S)]
    with running(tmp_path_factory.mktemp("sampling") / "log", *arguments) as service:
        yield service


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer  # takes seconds

    return AutoTokenizer.from_pretrained(model_folder("tiny"))


def ids_of(text: str) -> list[int]:
    ids: list[int] = tokenizer()(text)["input_ids"]
    return ids


def logits_of(tokens: list[int]) -> np.ndarray:
    from tests.worker.model_folder import reference_logits  # with transformers, in every process that collects tests

    return reference_logits(model_folder("tiny"), tokens, torch.float64).numpy()


def request(prompt: str | list[int] = PROMPT, max_tokens: int = COUNT, **sampling: Any) -> pb.GenerateRequest:
    made = pb.GenerateRequest()
    if isinstance(prompt, str):
        made.text = prompt
    else:
        made.token_ids.ids.extend(prompt)
    defaults = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 5}
    made.sampling.MergeFrom(pb.SamplingParams(**{**defaults, **sampling}))
    made.stopping.max_tokens = max_tokens
    made.stopping.ignore_eos = True
    return made


def run(service: Tandem, *requests: pb.GenerateRequest) -> list[Output]:
    return asyncio.run(generate_all(service.endpoint, requests))


def check_entries(told: list[pb.TokenLogprob], tokens: list[int], begin: int, num_top: int) -> None:
    """`told` is of the tokens from position `begin` on."""
    logits = logits_of(tokens)
    assert [entry.token_id for entry in told] == tokens[begin : begin + len(told)]
    for position, entry in enumerate(told, begin):
        top = tuple((other.token_id, other.logprob) for other in entry.top_logprobs)
        expected = entry_of(logits[position - 1], tokens[position], num_top)
        assert_near(TokenEntry(entry.logprob, entry.rank, top), expected)


def test_every_parameter_chooses_as_its_definition_says(service: Tandem) -> None:
    bias = tuple((token, 50.0) for token in range(40, 60))
    liked = {"logit_bias": dict(bias)}
    free, repetitive = run(service, request(STRANGE), request(STRANGE, **liked))
    word = tokenizer().decode(free.token_ids[3:5]).strip()
    words = tuple(tuple(ids_of(text)) for text in (word, f" {word}"))
    allowed = sorted({*range(0, VOCABULARY, 3), 7})
    bits = np.packbits(np.isin(np.arange(VOCABULARY), allowed), bitorder="little").tobytes()
    kinds: list[tuple[dict[str, Any], LogitRules]] = [
        ({**liked, "presence_penalty": 1.5}, LogitRules(bias=bias, presence_penalty=1.5)),
        ({**liked, "frequency_penalty": 0.75}, LogitRules(bias=bias, frequency_penalty=0.75)),
        ({"repetition_penalty": 1.5}, LogitRules(repetition_penalty=1.5)),
        ({"logit_bias": {free.token_ids[0]: -100, 40: 7.5}}, LogitRules(bias=((free.token_ids[0], -100.0), (40, 7.5)))),
        ({"bad_words": [word]}, LogitRules(bad_words=words)),
        ({"allowed_token_ids": pb.TokenIds(ids=allowed)}, LogitRules(allowed=bits)),
    ]
    prompt = ids_of(STRANGE)
    outputs = run(service, *[request(STRANGE, **parameters) for parameters, _ in kinds])
    for output, (parameters, rules) in zip(outputs, kinds, strict=True):
        logits = logits_of(prompt + output.token_ids)[len(prompt) - 1 :]
        chosen = [int(adjusted(logits[done], prompt, output.token_ids[:done], rules).argmax()) for done in range(COUNT)]
        assert output.token_ids == chosen, parameters
        assert output.token_ids not in (free.token_ids, repetitive.token_ids), f"{parameters} have no effect"
    assert word in free.text


def test_logprobs_of_output_and_prompt(service: Tandem) -> None:
    """A prompt of three steps; the same prompt is in the cache already, which its logprobs must not come from."""
    prompt = (ids_of("And God said, Let there be light: and there was light. ") * 99)[:1100]
    wanted = request(prompt, max_tokens=6, temperature=1.0)
    run(service, wanted)
    wanted.output.logprobs, wanted.output.prompt_logprobs, wanted.output.echo = 3, 2, True
    output, shared = run(service, wanted, request(prompt, max_tokens=2))
    assert (output.usage.cached_tokens, shared.usage.cached_tokens) == (0, 1088)
    tokens = prompt + output.token_ids
    check_entries(output.logprobs, tokens, len(prompt), 3)
    assert len(output.prompt_logprobs) == len(prompt) and not output.prompt_logprobs[0].HasField("logprob")
    check_entries(output.prompt_logprobs[1:], tokens, 1, 2)
    assert list(output.echo.token_ids) == prompt and output.echo.text == tokenizer().decode(prompt)
    assert b"".join(entry.bytes for entry in output.prompt_logprobs).decode() == output.echo.text


def test_the_prompt_is_told_of_once_for_all_samples_and_not_to_who_resumes(service: Tandem) -> None:
    with Client(service.endpoint) as client:
        options: Any = {"max_tokens": 8, "temperature": 1.5, "top_k": 0, "top_p": 1.0, "seed": 2, "ignore_eos": True}
        options |= {"logprobs": 1, "prompt_logprobs": 1, "echo": True, "frequency_penalty": 1.0}
        whole = client.complete(PROMPT, n=3, **options)
        assert whole.prompt is not None and whole.prompt.text == PROMPT
        assert [len(sample.prompt_logprobs) for sample in whole.samples] == [len(ids_of(PROMPT)), 0, 0]
        assert [len(sample.logprobs) for sample in whole.samples] == [8, 8, 8]
        first = whole.samples[0]
        rest = client.complete(PROMPT, output_token_ids=first.token_ids[:5], **options)
        assert rest.samples[0].token_ids == first.token_ids[5:], "penalties count what was given"
        assert [entry.token_id for entry in rest.samples[0].logprobs] == list(first.token_ids[5:])
        assert rest.prompt is None and not rest.samples[0].prompt_logprobs
        (shown,) = client.complete(PROMPT, **{**options, "top_k": 2, "temperature": 0.5}).samples
        assert all(entry.logprob is not None and entry.logprob < 0 for entry in shown.logprobs), "of all tokens"


def test_each_token_has_its_logprobs_whatever_is_held_back(service: Tandem) -> None:
    """Text waits for a stop string that may come; the client's count of logprobs is that of its tokens."""
    (free,) = run(service, request(max_tokens=40))
    stop = free.text[20:27]
    wanted = request(max_tokens=40)
    wanted.stopping.stop.extend([stop, free.text[:10] + "~"])
    wanted.output.logprobs = 0
    shown = pb.GenerateRequest()
    shown.CopyFrom(wanted)
    shown.output.include_stop_str_in_output = True
    output, inclusive = run(service, wanted, shown)
    assert output.text == free.text[: free.text.index(stop)] and inclusive.text == output.text + stop
    for one in (output, inclusive):
        assert one.finish.stop == stop
        assert [entry.token_id for entry in one.logprobs] == one.token_ids
    check_entries(output.logprobs, ids_of(PROMPT) + output.token_ids, len(ids_of(PROMPT)), 0)


def test_special_tokens_and_the_text_of_a_stop_token(service: Tandem) -> None:
    end = tokenizer().eos_token_id
    outputs = []
    for skip, include in ((True, True), (False, True), (False, False)):
        wanted = request(logit_bias={end: 100.0})
        wanted.stopping.ignore_eos = False
        wanted.output.skip_special_tokens, wanted.output.include_stop_str_in_output = skip, include
        outputs.append(wanted)
    texts = [output.text for output in run(service, *outputs)]
    assert texts == ["", tokenizer().decode([end]), ""]
    wanted = request(logit_bias={end: 100.0}, max_tokens=2)
    wanted.output.skip_special_tokens = False
    assert run(service, wanted)[0].text == tokenizer().decode([end, end])


def mixed(count: int) -> list[pb.GenerateRequest]:
    """Of all kinds, sampled and greedy, with logprobs and without."""
    made = []
    for number in range(count):
        wanted = request(PROMPT + " of" * (9 * number), max_tokens=110, temperature=[0.0, 1.0][number % 2], seed=number)
        wanted.sampling.presence_penalty, wanted.sampling.frequency_penalty = 0.5 * (number % 3), 0.25
        wanted.sampling.repetition_penalty = [1.0, 1.25][number % 2]
        wanted.sampling.logit_bias[60 + number] = 2.0
        wanted.sampling.bad_words.extend(["of the", "and"])
        if number % 4 != 3:
            wanted.output.logprobs, wanted.output.prompt_logprobs = number % 4, 1
        wanted.output.echo = number % 2 == 0
        made.append(wanted)
    return made


def assert_same(outputs: list[Output], expected: list[Output]) -> None:
    """Tokens and text exactly; of logprobs none lost, none twice."""
    for output, wanted in zip(outputs, expected, strict=True):
        assert (output.token_ids, output.text, output.finish) == (wanted.token_ids, wanted.text, wanted.finish)
        assert output.echo == wanted.echo
        for name in ("logprobs", "prompt_logprobs"):
            told, known = getattr(output, name), getattr(wanted, name)
            assert [entry.token_id for entry in told] == [entry.token_id for entry in known]
            assert [entry.rank for entry in told] == [entry.rank for entry in known]
            np.testing.assert_allclose(
                *([entry.logprob for entry in one] for one in (told, known)), rtol=1e-5, atol=1e-7
            )


@pytest.mark.parametrize("role", ["rank", "core"])
def test_nothing_changes_where_a_process_dies(service: Tandem, role: str) -> None:
    wanted = mixed(6)
    expected = run(service, *wanted)
    outputs = asyncio.run(disturbed(service, wanted, kill(service, role)))
    assert_same(outputs, expected)
    assert all(len(output.logprobs) == 110 for number, output in enumerate(outputs) if number % 4 != 3)
    asyncio.run(until_idle(service.endpoint))


def test_a_worker_dies_within_a_prompt(service: Tandem) -> None:
    """Some of the logprobs of its prompt were told already."""
    wanted = request((ids_of("In the beginning God created the heaven and the earth. ") * 200)[:2000], max_tokens=20)
    wanted.output.prompt_logprobs = 20
    (expected,) = run(service, wanted)

    async def scenario() -> Output:
        output = Output()
        streams = asyncio.create_task(_follow(service, wanted, output))
        while not output.prompt_logprobs:
            await asyncio.sleep(0.002)
        assert len(output.prompt_logprobs) < 2000, "the prompt was too short to disturb"
        kill(service, "launcher")()
        await asyncio.wait_for(streams, PATIENCE_S)
        return output

    assert_same([asyncio.run(scenario())], [expected])


async def _follow(service: Tandem, wanted: pb.GenerateRequest, output: Output) -> None:
    async with aio.insecure_channel(service.endpoint) as channel:
        await follow(channel, wanted, output)


def test_the_rest_goes_on_where_a_field_is_refused(service: Tandem) -> None:
    with Client(service.endpoint) as client:
        generate = partial(client.complete, PROMPT, max_tokens=2)
        for name, value in (("logit_bias", {VOCABULARY: 1.0}), ("allowed_token_ids", [-1]), ("presence_penalty", 2.5)):
            with pytest.raises(InvalidRequest, match=name):
                generate(**{name: value})
        assert len(generate(ignore_eos=True).samples[0].token_ids) == 2


def test_the_examples_of_the_documentation_run(service: Tandem) -> None:
    """As they stand, but for the address."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", DOCUMENTATION.read_text(), re.MULTILINE | re.DOTALL)
    (code,) = (text for language, text in blocks if language == "python")
    (command,) = (text for language, text in blocks if not language)
    run = partial(subprocess.run, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    shown = run([sys.executable, "-c", code.replace("127.0.0.1:50051", service.endpoint)]).stdout
    assert shown.startswith("It is a truth universally acknowledged") and shown.count("most likely") == 16
    _, *words = shlex.split(command)
    lines = run([sys.executable, "-m", "tandem", *words, "--endpoint", service.endpoint]).stdout.splitlines()
    pieces = [json.loads(line) for line in lines]
    assert sum(len(piece["logprobs"]) for piece in pieces) == sum(len(piece["token_ids"]) for piece in pieces) == 8
    assert "fortune" not in "".join(piece["text"] for piece in pieces)
