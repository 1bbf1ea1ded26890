"""Generate through the running services: equal to transformers, whatever else runs, however the prompt came."""

import asyncio
import json
from collections.abc import Iterator
from functools import cache

import grpc
import pytest
import torch
from grpc import aio

from shared.pb import generation_pb2 as pb
from shared.pb import generation_pb2_grpc
from tandem.models import model_folder
from tests.patience import PATIENCE_S
from tests.service.standing_still import StandingStill
from tests.service.tandem_process import (
    Output,
    Tandem,
    ending_early,
    follow,
    generate,
    generate_all,
    load,
    running,
    until_idle,
)

PROMPT = "It is a truth universally"
LONG = 1900
"""Tokens of an output that is still growing when a test has done something about it."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tandem]:
    log = tmp_path_factory.mktemp("generate") / "log"
    with running(log, "--dtype", "float64", "--frontends", "2", "--kv-cache-memory", "64") as service:
        yield service


@cache
def reference():
    """The same weights in transformers, imported here alone: it takes seconds, in every process that collects tests."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_folder("tiny")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return AutoTokenizer.from_pretrained(folder), model.eval()


def greedy(ids: list[int], count: int) -> list[int]:
    """transformers' most likely continuation, ignoring end-of-sequence."""
    _, model = reference()
    tokens = torch.tensor([ids])
    with torch.no_grad():
        for _ in range(count):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    return tokens[0, len(ids) :].tolist()


def request(
    prompt: str | list[int] = PROMPT, *, temperature: float = 0.0, max_tokens: int = 24, **more
) -> pb.GenerateRequest:
    made = pb.GenerateRequest(**more)
    if isinstance(prompt, str):
        made.text = prompt
    else:
        made.token_ids.ids.extend(prompt)
    made.sampling.temperature = temperature
    made.sampling.top_k, made.sampling.top_p, made.sampling.seed = 0, 1.0, 5
    made.stopping.max_tokens = max_tokens
    made.stopping.ignore_eos = True
    return made


def run(service: Tandem, *requests: pb.GenerateRequest) -> list[Output]:
    return asyncio.run(generate_all(service.endpoint, requests))


def refused(service: Tandem, wanted: pb.GenerateRequest) -> aio.AioRpcError:
    with pytest.raises(aio.AioRpcError) as caught:
        run(service, wanted)
    return caught.value


def test_greedy_equals_transformers_for_text_ids_and_chat(service: Tandem) -> None:
    tokenizer, _ = reference()
    ids = tokenizer(PROMPT)["input_ids"]
    messages = [{"role": "user", "content": "Who made the heaven and the earth?"}]
    chat = request()
    chat.chat.messages.add(**messages[0])
    chat_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    chat_ids = chat_ids if isinstance(chat_ids, list) else chat_ids["input_ids"]
    text, token_ids, rendered = run(service, request(), request(ids), chat)
    assert text.token_ids == token_ids.token_ids == greedy(ids, 24)
    assert rendered.token_ids == greedy(chat_ids, 24)
    assert text.text == tokenizer.decode(text.token_ids, skip_special_tokens=True)


def test_a_long_prompt_in_chunks_equals_transformers(service: Tandem) -> None:
    """Longer than one step takes, and its length a multiple of the block size (nano-vllm#144)."""
    tokenizer, _ = reference()
    ids = (tokenizer("And God said, Let there be light: and there was light. ")["input_ids"] * 99)[:1088]
    (cold,) = run(service, request(ids, max_tokens=6))
    (warm,) = run(service, request(ids, max_tokens=6))
    assert cold.token_ids == warm.token_ids == greedy(ids, 6)
    assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 1024)


def test_neighbours_change_nothing(service: Tandem) -> None:
    """Seeded and unseeded, greedy and sampled in one batch (vllm#51226, nano-vllm#249)."""
    mine = [request(temperature=temperature) for temperature in (0.0, 0.8)]
    alone = [run(service, wanted)[0] for wanted in mine]
    others = [request(f"{PROMPT} {number}", temperature=1.0) for number in range(20)]
    for other in others[::2]:
        other.sampling.ClearField("seed")
    together = run(service, *others, *mine)[-2:]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]


def test_samples_differ_and_each_can_be_had_alone(service: Tandem) -> None:
    async def scenario() -> tuple[list[Output], list[Output]]:
        async with aio.insecure_channel(service.endpoint) as channel:
            together = await generate(channel, request(temperature=2.0, n=3))
            second = await generate(channel, request(temperature=2.0, sample_index=1))
            return together, second

    together, second = asyncio.run(scenario())
    assert len({tuple(output.token_ids) for output in together}) == 3
    assert second[0].token_ids == together[1].token_ids


def test_a_sampled_stream_resumes_where_it_was_cut(service: Tandem) -> None:
    whole = run(service, request(temperature=2.0))[0]
    rest = request(temperature=2.0)
    rest.output_token_ids.ids.extend(whole.token_ids[:9])
    resumed = run(service, rest)[0]
    assert whole.token_ids[:9] + resumed.token_ids == whole.token_ids
    assert resumed.usage.completion_tokens == whole.usage.completion_tokens


def test_salts_separate_caches(service: Tandem) -> None:
    ids = list(range(300, 430))
    first, second, again = (request(ids, cache_salt=salt, max_tokens=2) for salt in ("a", "b", "a"))
    cached = [run(service, wanted)[0].usage.cached_tokens for wanted in (first, second, again)]
    assert cached == [0, 0, 128]


def test_equal_prompts_that_arrive_together_share_blocks(service: Tandem) -> None:
    ids = list(range(500, 630))
    outputs = run(service, *[request(ids, max_tokens=4) for _ in range(6)])
    assert sorted(output.usage.cached_tokens for output in outputs)[1:] == [128] * 5
    assert len({tuple(output.token_ids) for output in outputs}) == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda wanted: setattr(wanted.stopping, "max_tokens", 0), "max_tokens"),
        (lambda wanted: setattr(wanted, "text", ""), "text"),
        (lambda wanted: wanted.token_ids.SetInParent(), "token_ids"),
        (lambda wanted: wanted.token_ids.ids.append(-1), "token_ids"),
        (lambda wanted: wanted.token_ids.ids.append(1 << 40), "token_ids"),
        (lambda wanted: wanted.stopping.stop_token_ids.append(1 << 62), "stop_token_ids"),
        (lambda wanted: wanted.token_ids.ids.extend([1] * 2048), "2048"),
        (lambda wanted: setattr(wanted.sampling, "temperature", float("nan")), "temperature"),
        (lambda wanted: setattr(wanted.sampling, "top_p", 1.5), "top_p"),
    ],
)
def test_a_callers_mistake_is_named_and_the_rest_goes_on(service: Tandem, change, named: str) -> None:
    wanted = request()
    change(wanted)
    error = refused(service, wanted)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert named in (error.details() or "")
    assert len(run(service, request(max_tokens=2))[0].token_ids) == 2


@pytest.mark.parametrize("length", [2047, 2046])
def test_a_prompt_near_the_context_limit_ends_by_length(service: Tandem, length: int) -> None:
    (output,) = run(service, request([7] * length, max_tokens=100))
    assert output.finish.reason == pb.FINISH_REASON_LENGTH
    assert len(output.token_ids) == 2048 - length


def test_a_stop_string_is_never_shown(service: Tandem) -> None:
    whole = run(service, request(max_tokens=40))[0].text
    stop = whole[20:26]
    wanted = request(max_tokens=40)
    wanted.stopping.stop.append(stop)
    (output,) = run(service, wanted)
    assert output.text == whole[: whole.index(stop)]
    assert output.finish.stop == stop
    asyncio.run(until_idle(service.endpoint))


def test_a_live_id_is_refused_a_second_time_and_can_be_aborted_from_elsewhere(service: Tandem) -> None:
    async def scenario() -> tuple[aio.AioRpcError, aio.AioRpcError, bool]:
        async with aio.insecure_channel(service.endpoint) as one, aio.insecure_channel(service.endpoint) as other:
            output = Output()
            first = asyncio.create_task(follow(one, request(request_id="mine", max_tokens=LONG), output))
            while not output.token_ids:
                await asyncio.sleep(0.01)
            with pytest.raises(aio.AioRpcError) as duplicate:
                await follow(other, request(request_id="mine"), Output())
            stub = generation_pb2_grpc.GenerationServiceStub(other)
            found = (await stub.Abort(pb.AbortRequest(request_id="mine"))).found
            with pytest.raises(aio.AioRpcError) as aborted:
                await first
            return duplicate.value, aborted.value, found

    with ending_early(service.endpoint, LONG):
        duplicate, aborted, found = asyncio.run(scenario())
    assert found
    assert duplicate.code() is grpc.StatusCode.ALREADY_EXISTS
    assert aborted.code() is grpc.StatusCode.CANCELLED


def test_a_deadline_frees_everything(service: Tandem) -> None:
    async def scenario() -> aio.AioRpcError:
        async with aio.insecure_channel(service.endpoint) as channel:
            with pytest.raises(aio.AioRpcError) as caught:
                stub = generation_pb2_grpc.GenerationServiceStub(channel)
                async for _ in stub.Generate(request(max_tokens=LONG), timeout=0.4):
                    pass
            return caught.value

    with ending_early(service.endpoint, LONG):
        assert asyncio.run(scenario()).code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_more_important_requests_come_first(tmp_path) -> None:
    """With one place to run, a later but more important request ends before the one that runs and those that wait."""
    still = StandingStill(tmp_path)
    arguments = ["--max-num-seqs", "1", "--kv-cache-memory", "64", *still.arguments]
    with running(tmp_path / "log", *arguments, **still.env) as service:

        async def scenario() -> list[str]:
            ended: list[str] = []

            async def one(name: str, priority: int) -> None:
                await follow(channel, request(priority=priority, max_tokens=20), Output())
                ended.append(name)

            async with aio.insecure_channel(service.endpoint) as channel:
                with still.now():
                    first = asyncio.create_task(one("first", 1))
                    while not (await load(service.endpoint)).running:
                        await asyncio.sleep(0.01)
                    others = [asyncio.create_task(one(name, 1)) for name in ("second", "third")]
                    while (await load(service.endpoint)).queued < len(others):
                        await asyncio.sleep(0.01)
                    important = asyncio.create_task(one("important", 0))
                    while (await load(service.endpoint)).queued <= len(others):
                        await asyncio.sleep(0.01)
                await asyncio.gather(first, important, *others)
            return ended

        assert asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S)) == ["important", "first", "second", "third"]


def test_what_can_never_fit_the_pool_is_refused_at_once(tmp_path) -> None:
    """A pool of four blocks: what fits runs to its end, what can't is told so, and nobody waits behind it.

    65 tokens fit, since the K/V of a last token is never computed (nano-vllm#274, vllm#35541).
    """
    arguments = ["--num-kv-blocks", "4", "--block-size", "16", "--dtype", "float64"]
    with running(tmp_path / "log", *arguments) as service:
        error = refused(service, request([7] * 65))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "65" in (error.details() or "")
        outputs = run(service, *[request([7] * 64, max_tokens=9) for _ in range(4)], request([9] * 30, max_tokens=30))
        assert [len(output.token_ids) for output in outputs] == [1, 1, 1, 1, 30]
        assert outputs[0].finish.reason == pb.FINISH_REASON_LENGTH
        assert outputs[-1].token_ids == greedy([9] * 30, 30)


def test_tokenize_detokenize_info(service: Tandem) -> None:
    tokenizer, _ = reference()
    text = "Let there be light \u2600 \U0001f54a"

    async def scenario():
        async with aio.insecure_channel(service.endpoint) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            ids = (await stub.Tokenize(pb.TokenizeRequest(text=text))).token_ids
            back = (await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text
            return list(ids), back, await stub.GetModelInfo(pb.GetModelInfoRequest())

    ids, back, info = asyncio.run(scenario())
    assert ids == tokenizer(text)["input_ids"] and back == text
    config = json.loads((model_folder("tiny") / "config.json").read_text())
    assert info.vocabulary_size == config["vocab_size"] and info.max_context_length == config["max_position_embeddings"]
    assert set(info.eos_token_ids) >= {tokenizer.eos_token_id}
