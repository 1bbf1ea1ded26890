"""OpenAI's HTTP API through the real gateway, as the openai client sees it."""

import asyncio
import contextlib
import json
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
from grpc import aio

from shared.errors import StartupError
from shared.pb import generation_pb2 as pb
from shared.ports import find_free
from shared.process import STARTUP_FAILED
from tandem import Client, gateway
from tests.patience import PATIENCE_S
from tests.service.standing_still import StandingStill
from tests.service.tandem_process import Tandem, ending_early, generate, load, running, until_idle
from tests.service.test_docs import DOCS, blocks

openai = pytest.importorskip("openai", reason="the openai client is not installed: pip install openai")
if find_spec("smg") is None:
    pytest.skip("the gateway is not installed: pip install 'tandem-serve[gateway]'", allow_module_level=True)

TEXT = "It is a truth universally"
CHAT = [{"role": "user", "content": "Who made the heaven and the earth?"}]


class OpenAI(Tandem):
    """`tandem openai` on free ports."""

    command = "openai"

    def __init__(self, log: Path, *arguments: str, **env: str) -> None:
        self.http_port = find_free("127.0.0.1")
        super().__init__(log, "--http-port", str(self.http_port), *arguments, **env)

    def client(self, **options: Any) -> Any:
        return client(self.http_port, **options)

    def asking(self) -> Any:
        """A client whose calls are awaited."""
        url = f"http://127.0.0.1:{self.http_port}/v1"
        return openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=PATIENCE_S)


def client(http_port: int, **options: Any) -> Any:
    """Without retries of its own: the first answer counts."""
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{http_port}/v1", max_retries=0, timeout=PATIENCE_S, **{"api_key": "any", **options}
    )


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> StandingStill:
    return StandingStill(tmp_path_factory.mktemp("still"))


@pytest.fixture(scope="module")
def service(still: StandingStill, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    log = tmp_path_factory.mktemp("openai") / "log"
    limits = ("--kv-cache-memory", "64", "--max-num-seqs", "2", "--max-queue", "4", *still.arguments)
    with running(log, "--dtype", "float64", *limits, kind=OpenAI, **still.env) as service:
        yield service


def expected(service: Tandem, request: pb.GenerateRequest, max_tokens: int) -> str:
    """Tandem's own API's greedy text."""
    request.sampling.temperature = 0.0
    request.stopping.max_tokens = max_tokens

    async def scenario() -> str:
        async with aio.insecure_channel(service.endpoint) as channel:
            (output,) = await generate(channel, request)
            return output.text

    return asyncio.run(scenario())


def completion_text(stream: Any) -> tuple[str, Any]:
    """A streamed completion's text, and its last chunk with a usage."""
    text, usage = "", None
    for chunk in stream:
        text += "".join(choice.text for choice in chunk.choices)
        usage = chunk.usage or usage
    return text, usage


def test_completions_streamed_and_not_are_the_models_text(service: OpenAI) -> None:
    wanted = expected(service, pb.GenerateRequest(text=TEXT), 24)
    asked = {"model": "tiny", "prompt": TEXT, "temperature": 0, "max_tokens": 24}
    answer = service.client().completions.create(**asked)
    streamed, usage = completion_text(
        service.client().completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert answer.choices[0].text == streamed == wanted
    assert answer.choices[0].finish_reason == "length"
    for told in (answer.usage, usage):
        assert (told.prompt_tokens, told.completion_tokens, told.total_tokens) == (10, 24, 34)


def test_chats_streamed_and_not_are_the_models_text(service: OpenAI) -> None:
    request = pb.GenerateRequest()
    request.chat.messages.add(**CHAT[0])
    wanted = expected(service, request, 60)
    asked = {"model": "tiny", "messages": CHAT, "temperature": 0, "max_completion_tokens": 60}
    answer = service.client().chat.completions.create(**asked)
    streamed, usage = "", None
    for chunk in service.client().chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        streamed += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert answer.choices[0].message.content == streamed == wanted
    assert answer.choices[0].finish_reason == "stop"
    assert usage == answer.usage and usage.completion_tokens < 60


@pytest.mark.parametrize("stream", [True, False])
def test_usage_tells_what_came_from_the_cache(service: OpenAI, stream: bool) -> None:
    asked = {"model": "tiny", "prompt": f"{stream} " + "In the beginning. " * 40, "max_tokens": 3, "temperature": 0}
    usages = []
    for _ in range(2):
        if stream:
            told = service.client().completions.create(**asked, stream=True, stream_options={"include_usage": True})
            usages.append(completion_text(told)[1])
        else:
            usages.append(service.client().completions.create(**asked).usage)
    first, second = usages
    assert first.completion_tokens == second.completion_tokens == 3 and first.prompt_tokens == second.prompt_tokens
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]
    assert cached == [0, (first.prompt_tokens - 1) // 64 * 64] and cached[1] > 0


def test_seeds_samples_and_stop_strings(service: OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "She said", "temperature": 2, "top_p": 1, "max_tokens": 24, "n": 2}
    first, again, other = (service.client().completions.create(**asked, seed=seed) for seed in (7, 7, 8))
    texts = [[choice.text for choice in answer.choices] for answer in (first, again, other)]
    assert [choice.index for choice in first.choices] == [0, 1]
    assert texts[0] == texts[1] != texts[2] and texts[0][0] != texts[0][1]
    stopped = service.client().completions.create(model="tiny", prompt=TEXT, temperature=0, max_tokens=40, stop=["man"])
    assert stopped.choices[0].finish_reason == "stop" and "man" not in stopped.choices[0].text
    assert stopped.usage.completion_tokens < 40


def test_the_model_and_its_limits(service: OpenAI) -> None:
    assert [model.id for model in service.client().models.list()] == ["tiny"]
    with pytest.raises(openai.BadRequestError, match="2048"):
        service.client().completions.create(model="tiny", prompt="a b " * 4000)
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        service.client().completions.create(model="tiny", prompt="a", max_tokens=0)
    with pytest.raises(openai.NotFoundError):
        service.client().completions.create(model="huge", prompt="a")


SCHEMA = {
    "type": "object",
    "properties": {"who": {"enum": ["God", "nobody"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["who", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "made_by", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "unknown", "parameters": {"type": "object", "properties": {}}}},
]
ASKED = {"model": "tiny", "messages": CHAT, "temperature": 0}


def test_an_answer_in_json_keeps_to_its_schema(service: OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    answer = service.client().chat.completions.create(**ASKED, response_format=wanted, max_completion_tokens=200)
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)
    with pytest.raises(openai.BadRequestError, match="json_schema"):
        wrong = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": 1}}}
        service.client().chat.completions.create(**ASKED, response_format=wrong)


def test_a_named_tool_is_called(service: OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "made_by"}}
    answer = service.client().chat.completions.create(
        **ASKED, tools=TOOLS, tool_choice=choice, max_completion_tokens=200
    )
    assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "made_by"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


def test_some_tool_is_called_where_one_is_required(service: OpenAI) -> None:
    """Streamed: the tiny model never ends the array of calls, but the first call is whole."""
    stream = service.client().chat.completions.create(
        **ASKED, tools=TOOLS[:1], tool_choice="required", max_completion_tokens=100, stream=True
    )
    name, arguments = "", ""
    for chunk in stream:
        for call in [call for choice in chunk.choices for call in choice.delta.tool_calls or [] if call.index == 0]:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert name == "made_by"
    jsonschema.validate(json.loads(arguments), SCHEMA)


def test_logprobs_are_those_of_tandems_own_api(service: OpenAI) -> None:
    asked = {**ASKED, "logprobs": True, "top_logprobs": 3, "max_completion_tokens": 5}
    answer = service.client().chat.completions.create(**asked).choices[0].logprobs.content
    stream = service.client().chat.completions.create(**asked, stream=True)
    streamed = [
        token for chunk in stream for choice in chunk.choices if choice.logprobs for token in choice.logprobs.content
    ]
    assert answer == streamed
    with Client(service.endpoint) as own:
        wanted = [
            token for delta in own.generate(CHAT, temperature=0, max_tokens=5, logprobs=3) for token in delta.logprobs
        ]
    assert len(answer) == len(wanted) == 5
    for told, token in zip(answer, wanted, strict=True):
        assert tuple(told.bytes) == token.bytes and told.logprob == pytest.approx(token.logprob, abs=1e-5)
        tops = [(tuple(top.bytes), top.logprob) for top in told.top_logprobs]
        assert [text for text, _ in tops] == [top.bytes for top in token.top_logprobs]
        assert [value for _, value in tops] == pytest.approx([top.logprob for top in token.top_logprobs], abs=1e-5)


def test_penalties_arrive(service: OpenAI) -> None:
    asked = {"model": "tiny", "prompt": TEXT, "temperature": 0, "max_tokens": 40}
    plain = service.client().completions.create(**asked).choices[0].text
    penalties = {"frequency_penalty": 2, "presence_penalty": 2, "extra_body": {"repetition_penalty": 2}}
    penalised = service.client().completions.create(**asked, **penalties).choices[0].text
    assert plain != penalised
    request = pb.GenerateRequest(text=TEXT)
    sampling = request.sampling
    sampling.frequency_penalty = sampling.presence_penalty = sampling.repetition_penalty = 2
    assert penalised == expected(service, request, 40)


LONG: dict[str, Any] = {"model": "tiny", "prompt": TEXT, "max_tokens": 1900, "extra_body": {"ignore_eos": True}}


async def until(service: Tandem, condition: Callable[[pb.GetLoadResponse], bool]) -> None:
    """Waits until the service is as busy as that."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition(await load(service.endpoint)):
            await asyncio.sleep(0.02)


def test_a_client_that_leaves_a_stream_ends_its_request(service: OpenAI, still: StandingStill) -> None:
    with ending_early(service.endpoint, LONG["max_tokens"]):
        stream = service.client().completions.create(**LONG, stream=True)
        next(iter(stream))
        with still.now():
            asyncio.run(until(service, lambda load: load.running == 1))
            stream.close()  # the gateway notices when it has the next piece for it


def test_a_client_that_leaves_before_its_answer_ends_its_request(service: OpenAI, still: StandingStill) -> None:
    async def scenario() -> None:
        async with service.asking() as asking:
            call = asyncio.create_task(asking.completions.create(**LONG))
            await until(service, lambda load: load.running == 1)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await until_idle(service.endpoint)

    with still.now():
        asyncio.run(scenario())


def test_who_finds_the_queue_full_gets_429(service: OpenAI, still: StandingStill) -> None:
    async def scenario() -> None:
        async with service.asking() as asking:
            taken = [asyncio.create_task(asking.completions.create(**LONG)) for _ in range(2)]
            await until(service, lambda load: load.running == 2)
            with still.now():
                taken += [asyncio.create_task(asking.completions.create(**LONG)) for _ in range(4)]
                await until(service, lambda load: load.queued == 4)
                with pytest.raises(openai.RateLimitError, match="try again"):
                    await asking.completions.create(**LONG)
                for call in taken:
                    call.cancel()
                ends = await asyncio.gather(*taken, return_exceptions=True)
                assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
                await until_idle(service.endpoint)

    asyncio.run(scenario())


@pytest.mark.parametrize("role", ["rank", "core"])
def test_a_stream_goes_on_with_the_same_text_when_a_process_dies(service: OpenAI, role: str) -> None:
    asked = {**LONG, "max_tokens": 150, "temperature": 0, "stream": True}
    undisturbed, _ = completion_text(service.client().completions.create(**asked))
    text = ""
    for number, chunk in enumerate(service.client().completions.create(**asked)):
        text += "".join(choice.text for choice in chunk.choices)
        if number == 40:
            for process in service.processes(role):
                process.kill()
            # Nobody is sent away meanwhile.
            assert service.client().completions.create(model="tiny", prompt="It", max_tokens=1).usage.total_tokens
    assert text == undisturbed


def test_the_pages_examples_run(service: OpenAI) -> None:
    page = DOCS / "openai.md"
    install, *shell = blocks(page, "sh")
    assert "tandem openai" in install and len(shell) == 1
    for command in (["bash", "-euc", shell[0]], [sys.executable, "-c", blocks(page, "python")[0]]):
        command[-1] = command[-1].replace("127.0.0.1:8000", f"127.0.0.1:{service.http_port}")
        result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        assert result.returncode == 0 and "completion_tokens" in result.stdout, result


def test_no_gateway_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "find_spec", lambda name: None)
    with pytest.raises(StartupError, match=r"pip install 'tandem-serve\[gateway\]'"):
        gateway.require_installed()


def test_a_busy_port_is_one_line(service: OpenAI) -> None:
    command = [sys.executable, "-m", "tandem", "openai", "--port", str(find_free("127.0.0.1"))]
    for flag in ("--http-port", "--http-metrics-port"):
        free = [] if flag == "--http-port" else ["--http-port", str(find_free("127.0.0.1"))]
        result = subprocess.run(
            [*command, *free, flag, str(service.http_port)], capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert result.returncode and str(service.http_port) in result.stderr and flag in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_an_option_that_the_gateway_does_not_know_is_told_once() -> None:
    command = [sys.executable, "-m", "tandem", "openai", "--port", str(find_free("127.0.0.1")), "--http-port"]
    result = subprocess.run(
        [*command, str(find_free("127.0.0.1")), "--", "--no-such-option"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert result.returncode == STARTUP_FAILED and result.stderr.count("unrecognized arguments") == 1


def test_further_options_reach_the_gateway_and_it_dies_with_whoever_started_it(tmp_path: Path) -> None:
    service = OpenAI(tmp_path / "log", "--kv-cache-memory", "64", "--", "--api-key", "secret")
    try:
        service.wait_ready()
        asked = {"model": "tiny", "prompt": "a", "max_tokens": 1}
        with pytest.raises(openai.AuthenticationError):
            service.client(api_key="wrong").completions.create(**asked)
        assert service.client(api_key="secret").completions.create(**asked).choices
        family = service.everyone()
        assert any("smg" in process.name() for process in family)
    finally:
        service.process.kill()
        service.process.wait()
    deadline = time.monotonic() + PATIENCE_S
    while any(is_alive(process) for process in family):
        assert time.monotonic() < deadline, family
        time.sleep(0.05)


def is_alive(process: psutil.Process) -> bool:
    """Not so one that only waits for its status to be read."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@contextlib.contextmanager
def gateway_before(log: Path, *endpoints: str) -> Iterator[tuple[int, int]]:
    """One gateway before several engines, by the page's command: its ports for HTTP and metrics."""
    http, metrics = find_free("127.0.0.1"), find_free("127.0.0.1")
    (example,) = re.findall(r"^smg launch .*?[^\\]$", (DOCS / "openai.md").read_text(), re.MULTILINE | re.DOTALL)
    engines = " ".join(f"grpc://{endpoint}" for endpoint in endpoints)
    words = shlex.split(re.sub(r"grpc://\S+( grpc://\S+)*", engines, example.replace("\\\n", " ")))
    words[words.index("--port") + 1] = str(http)
    command = [sys.executable, "-m", *words, "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            yield http, metrics
        finally:
            process.kill()


def metric(port: int, name: str) -> float:
    """Sum over all label sets; 0 while nobody answers."""
    with contextlib.suppress(OSError):
        lines = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))
    return 0.0


def test_a_gateway_sends_prompts_to_the_engine_that_has_their_prefix(tmp_path: Path) -> None:
    """The engines get the prompts behind the gateway's back: only their events can tell it who has which."""
    prompts = [f"{number} times in the beginning God created the heaven and the earth. " * 8 for number in range(10)]
    engine = ("--kv-cache-memory", "64")
    with running(tmp_path / "one", *engine) as one, running(tmp_path / "two", *engine) as two:
        for number, prompt in enumerate(prompts):
            expected((one, two)[number % 2], pb.GenerateRequest(text=prompt), 1)
        with gateway_before(tmp_path / "gateway", one.endpoint, two.endpoint) as (http, metrics):
            blocks = len(prompts) * 2
            deadline = time.monotonic() + PATIENCE_S
            while metric(metrics, "smg_kv_index_blocks") < blocks:
                assert time.monotonic() < deadline, (tmp_path / "gateway").read_text()
                time.sleep(0.1)
            for prompt in prompts:
                usage = client(http).completions.create(model="tiny", prompt=prompt, max_tokens=1).usage
                assert usage.prompt_tokens_details.cached_tokens >= 128
