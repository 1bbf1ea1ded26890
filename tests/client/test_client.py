"""The client library over real gRPC: both clients, what they give, what they raise, what they leave behind."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import psutil
import pytest
from tokenizers import Tokenizer

import tandem
from shared.pb import core_pb2
from tandem import AsyncClient, ChatMessage, Client, Finish, WorkerLoad
from tandem import requests as tandem_requests
from tests.client.conftest import Server
from tests.frontend.fake_core import Answer, failed, ids, length, stopped
from tests.patience import PATIENCE_S


def _answering(tokenizer: Tokenizer, text: str) -> Callable[[core_pb2.Submit], Answer]:
    return lambda submit: (tokenizer.encode(text).ids, length())


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_generate_streams_typed_deltas(server: Server, tokenizer: Tokenizer) -> None:
    output = tokenizer.encode("fox 🙂").ids
    with Client(server.endpoint) as client:
        stream = client.generate("The", seed=5, request_id="r")
        _wait(lambda: len(server.core.submits) == 1)
        (submit,) = server.core.submits
        for token in output:
            server.give(submit, [token])
        server.give(submit, [], length())
        *deltas, last = stream
        assert (stream.request_id, stream.seed) == ("r", 5)
        assert "".join(delta.text for delta in (*deltas, last)) == "fox 🙂"
        assert [token for delta in (*deltas, last) for token in delta.token_ids] == output
        assert all(delta.finish is None and delta.usage is None for delta in deltas)
        assert last.finish == Finish("length", None)
        assert last.usage == tandem.Usage(
            prompt_tokens=len(tokenizer.encode("The").ids), completion_tokens=len(output), cached_tokens=0
        )


def test_complete_gives_every_sample_whole(server: Server, tokenizer: Tokenizer) -> None:
    server.answer = lambda submit: (tokenizer.encode("fox" * (submit.sample_index + 1)).ids, length())
    with Client(server.endpoint) as client:
        completion = client.complete("The", n=3, seed=9)
        assert [sample.text for sample in completion.samples] == ["fox", "foxfox", "foxfoxfox"]
        assert (completion.text, completion.seed, completion.samples[2].index) == ("fox", 9, 2)


def test_every_option_arrives(server: Server, tokenizer: Tokenizer) -> None:
    server.answer = lambda submit: ([7], stopped(7))
    with Client(server.endpoint) as client:
        completion = client.complete(
            [1, 2, 3],
            max_tokens=9,
            min_tokens=1,
            temperature=0.5,
            top_k=3,
            top_p=0.5,
            min_p=0.25,
            stop=["x"],
            stop_token_ids=[7],
            ignore_eos=True,
            sample_index=4,
            output_token_ids=[5],
            cache_salt="salt",
            priority=-1,
            timeout=5,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.5,
            logit_bias={5: -2.0},
            bad_words=["fox"],
            allowed_token_ids=[5, 7],
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            echo=True,
            logprobs=3,
            prompt_logprobs=0,
        )
    assert completion.samples[0].finish == Finish("stop", 7)
    (submit,) = server.core.submits
    assert (ids(submit.prompt), ids(submit.output), ids(submit.stop_token_ids)) == ([1, 2, 3], [5], [7])
    assert (submit.max_tokens, submit.min_tokens, submit.sample_index) == (9, 1, 4)
    assert (submit.cache_salt, submit.priority, submit.request_id) == ("salt", -1, completion.request_id)
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.5, 0.25)
    rules = sampling.rules
    assert (rules.presence_penalty, rules.frequency_penalty, rules.repetition_penalty) == (0.5, -0.5, 1.5)
    assert (ids(rules.bias_ids), rules.allowed[0], bool(rules.bad_words)) == ([5], 0b10100000, True)
    assert sampling.logprobs == 3 and not sampling.HasField("prompt_logprobs"), "it resumes: the prompt was told of"


def test_a_misspelt_option_is_an_error_and_not_ignored(server: Server) -> None:
    with Client(server.endpoint) as client, pytest.raises(TypeError, match="max_token"):
        client.generate("a", max_token=3)  # type: ignore[call-arg]


def test_chats_are_messages_or_mappings(server: Server, tokenizer: Tokenizer) -> None:
    server.answer = _answering(tokenizer, "fox")
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo", "reasoning_content": "hm"}]
    same = [ChatMessage("user", "Hi"), ChatMessage("assistant", "Yo", {"reasoning_content": "hm"})]
    with Client(server.endpoint) as client:
        assert client.complete(turns).text == client.complete(same).text == "fox"
        assert client.tokenize(turns) == ids(server.core.submits[0].prompt) == ids(server.core.submits[1].prompt)
        rendered = client.detokenize(client.tokenize(turns, add_generation_prompt=False), skip_special_tokens=False)
        assert "<think>\nhm\n</think>\n\nYo<|im_end|>\n" in rendered
        thoughtless = client.tokenize(turns[:1], template_kwargs={"enable_thinking": False})
        assert client.detokenize(thoughtless).endswith("<think>\n\n</think>\n\n")
        with_tool = client.tokenize(turns[:1], tools=[{"type": "function", "b": 1, "a": 2}])
        assert '{"type": "function", "b": 1, "a": 2}' in client.detokenize(with_tool)


def test_the_calls_around_generate(server: Server, tokenizer: Tokenizer) -> None:
    with Client(server.endpoint) as client:
        assert client.tokenize("fox 🙂") == tokenizer.encode("fox 🙂").ids
        assert client.detokenize(tokenizer.encode("fox 🙂").ids) == "fox 🙂"
        info = client.model_info()
        assert (info.architecture, info.eos_token_ids, info.max_context_length) == ("Qwen3ForCausalLM", (398, 400), 200)
        assert client.load().workers == (WorkerLoad("worker:1", True, 0, 64, 60),)
        assert not client.abort("nobody")


def test_leaving_the_loop_ends_the_request_at_the_server(server: Server) -> None:
    server.answer = lambda submit: ([7], None)
    with Client(server.endpoint) as client:
        stream = client.generate("a")
        for _ in stream:
            break
        _wait(lambda: len(server.core.cancelled) == 1)


def test_leaving_the_context_ends_the_request_and_the_stream(server: Server) -> None:
    with Client(server.endpoint) as client:
        with client.generate("a") as stream:
            _wait(lambda: len(server.core.submits) == 1)
        _wait(lambda: len(server.core.cancelled) == 1)
        with pytest.raises(tandem.Aborted):
            list(stream)


def test_an_aborted_request_raises(server: Server) -> None:
    with Client(server.endpoint) as client:
        stream = client.generate("a")
        _wait(lambda: len(server.core.submits) == 1)
        assert client.abort(stream.request_id)
        with pytest.raises(tandem.Aborted, match="aborted by its id"):
            list(stream)


def test_errors_are_typed_and_carry_the_server_s_message(server: Server) -> None:
    refusals = iter(
        [
            failed(8, "queue full", 700),
            failed(8, "not read"),
            failed(6, "live"),
            failed(14, "no worker"),
            failed(13, "NaN"),
        ]
    )
    server.answer = lambda submit: ((), next(refusals))
    with Client(server.endpoint, resume_timeout=0, queue_timeout=0) as client:
        with pytest.raises(tandem.InvalidRequest, match="must be within") as invalid:
            client.complete("a", temperature=-1)
        assert invalid.value.field == "sampling.temperature"
        with pytest.raises(tandem.QueueFull, match="queue full") as full:
            client.complete("a")
        assert full.value.retry_after_ms == 700
        with pytest.raises(tandem.LimitExceeded, match="not read"):  # no hint: trying again is of no use
            client.complete("a")
        for kind, message in (
            (tandem.DuplicateRequest, "live"),
            (tandem.Unavailable, "no worker"),
            (tandem.RequestFailed, "NaN"),
        ):
            with pytest.raises(kind, match=message):
                client.complete("a")
        server.answer = lambda submit: ((), None)
        with pytest.raises(tandem.DeadlineExceeded):
            client.complete("a", timeout=0.1)
        with pytest.raises(tandem.InvalidRequest, match="token_ids"):
            client.detokenize([-1])


def test_no_server_is_unavailable() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(tandem.Unavailable):
        client.model_info()


def test_requests_go_over_several_connections_in_turn(server: Server) -> None:
    """Each connection reaches one frontend process only."""
    port = int(server.endpoint.rpartition(":")[2])
    with Client(server.endpoint, connections=3) as client:
        for _ in range(6):
            client.model_info()
        connections = psutil.Process().net_connections("tcp")
        assert sum(c.status == psutil.CONN_ESTABLISHED and c.raddr.port == port for c in connections) == 3


def test_the_async_client_says_the_same(server: Server, tokenizer: Tokenizer) -> None:
    server.answer = _answering(tokenizer, "fox 🙂")

    async def scenario() -> None:
        async with AsyncClient(server.endpoint) as client:
            stream = client.generate("The", seed=5)
            text = "".join([delta.text async for delta in stream])
            assert (text, stream.seed) == ("fox 🙂", 5)
            completions = await asyncio.gather(*(client.complete("The") for _ in range(8)))
            assert {completion.text for completion in completions} == {"fox 🙂"}
            assert await client.tokenize("fox") == tokenizer.encode("fox").ids
            assert await client.detokenize(tokenizer.encode("fox").ids) == "fox"
            assert (await client.model_info()).vocabulary_size == 512
            assert (await client.load()).max_running == 8
            assert not await client.abort("nobody")
            with pytest.raises(tandem.InvalidRequest, match="text"):
                await client.complete("")
            with pytest.raises(tandem.InvalidRequest, match="token_ids"):
                await client.detokenize([-1])
            server.answer = lambda submit: ([7], None)
            async for _ in client.generate("a"):
                break
            async with client.generate("b") as stream:
                async for _ in stream:
                    break
            while len(server.core.cancelled) < 2:
                await asyncio.sleep(0.005)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_importing_the_library_loads_neither_the_scheduler_nor_torch() -> None:
    code = "import sys, tandem; sys.exit(any(n.split('.')[0] in ('scheduler_svc', 'torch') for n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("The", {"max_tokens": -1}, "max_tokens"),
        ("The", {"max_tokens": 1 << 40}, "max_tokens"),
        ("The", {"seed": -1}, "seed"),
        ("The", {"temperature": "hot"}, "temperature"),
        ("The", {"n": -1}, "n"),
        ("The", {"output_token_ids": ["a"]}, "output_token_ids"),
        ("The \ud83d", {}, "text"),
        ([1 << 70], {}, "token_ids"),
        (b"The", {}, "prompt"),
        (None, {}, "prompt"),
        ({"role": "user"}, {}, "prompt"),
        ([{"content": "The"}], {}, "messages[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, "messages[0]"),
        ([{"role": "user", "content": "The"}], {"tools": [object()]}, "tools"),
    ],
)
def test_what_no_field_can_hold_is_refused_by_name(prompt: object, options: dict[str, object], field: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(tandem.InvalidRequest) as refused:
        client.generate(prompt, **options)  # type: ignore[arg-type]
    assert refused.value.field == field


def test_one_stop_string_needs_no_list(server: Server) -> None:
    server.answer = lambda submit: ([7], stopped(7))
    with Client(server.endpoint) as client:
        assert client.complete("The", stop="fox").samples[0].finish == Finish("stop", 7)
        with pytest.raises(tandem.InvalidRequest, match="stop"):
            client.complete("The", stop="")
    request = tandem_requests.generate_request("The", stop="fox")
    assert list(request.stopping.stop) == ["fox"]


def test_a_server_of_something_else_is_told_apart() -> None:
    """Such as a worker, whose address stands beside the scheduler's."""
    other = grpc.server(ThreadPoolExecutor(1))
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    with Client(f"127.0.0.1:{port}") as client, pytest.raises(tandem.RequestFailed, match="give the address of one"):
        client.complete("The")
    other.stop(0).wait()
