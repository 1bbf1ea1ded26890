"""Constrained output through the running services: it keeps to its language, whoever dies, whatever runs beside it."""

import asyncio
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from shared.pb import generation_pb2 as pb
from tandem import Client, InvalidRequest
from tests.patience import PATIENCE_S
from tests.service.losses import disturbed, kill, survives
from tests.service.tandem_process import Output, Tandem, generate_all, running, until_idle

PROMPT = "It is a truth universally"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,10}( [A-Z][a-z]{2,10})?$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "sisters": {
            "type": "array",
            "items": {"enum": ["Jane", "Mary", "Kitty", "Lydia"]},
            "minItems": 4,
            "maxItems": 9,
        },
    },
    "required": ["name", "age", "sisters"],
    "additionalProperties": False,
}
SENTENCE = r"[A-Z][a-z]{1,8}( [a-z]{1,9}){3,6}\."
SENTENCES = rf"({SENTENCE} ){{8,12}}"
CALLS = 'start: call+\ncall: "dance(" /[a-z]{3,12}/ ("," /[0-9]{1,3}/)* ")\\n"'
CHOICES = ["a single man", "in want of a wife", "good fortune"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tandem]:
    arguments = ["--dtype", "float64", "--frontends", "2", "--step-timeout", "2", "--kv-cache-memory", "64"]
    with running(tmp_path_factory.mktemp("constrain") / "log", *arguments) as service:
        yield service


def request(constraint: pb.Constraint | None = None, *, seed: int = 1, max_tokens: int = 120) -> pb.GenerateRequest:
    made = pb.GenerateRequest(text=PROMPT, constraint=constraint)
    made.sampling.temperature, made.sampling.seed = 1.0, seed
    made.stopping.max_tokens = max_tokens
    return made


def run(service: Tandem, *wanted: pb.GenerateRequest) -> list[Output]:
    return asyncio.run(generate_all(service.endpoint, wanted))


def valid_json(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def are_calls(text: str) -> bool:
    """The grammar of CALLS, by a regular expression of its lines."""
    return all(
        re.fullmatch(r"dance\([a-z]{3,12}(,[0-9]{1,3})*\)", line) for line in text.removesuffix("\n").split("\n")
    )


KINDS: list[tuple[pb.Constraint, Callable[[str], Any]]] = [
    (pb.Constraint(json_schema=json.dumps(SCHEMA)), valid_json),
    (pb.Constraint(regex=SENTENCE), lambda text: re.fullmatch(SENTENCE, text)),
    (pb.Constraint(grammar=CALLS), are_calls),
    (pb.Constraint(choice=pb.Choice(choices=CHOICES)), CHOICES.__contains__),
]


def long_ones() -> list[pb.GenerateRequest]:
    """A few of each kind that takes many tokens, and free ones among them."""
    grow = pb.Constraint(grammar=CALLS.replace("call+", "call~20..30"))
    names = pb.Constraint(json_schema=json.dumps({"type": "array", "items": SCHEMA, "minItems": 3}))
    kinds = [pb.Constraint(regex=SENTENCES), names, grow, None]
    wanted = [request(kinds[number % 4], seed=number, max_tokens=60) for number in range(8)]
    for one in wanted[3::4]:
        one.stopping.ignore_eos = True
    return wanted


def test_every_output_keeps_to_its_own_language(service: Tandem) -> None:
    """In one batch, beside free ones: a mask belongs to one row."""
    wanted, free = [request(KINDS[n % 4][0], seed=n) for n in range(16)], [request(seed=n) for n in range(4)]
    alone = run(service, free[0])[0]
    outputs = run(service, *wanted, *free)
    for number, output in enumerate(outputs[:16]):
        if output.finish.reason == pb.FINISH_REASON_STOP:
            assert KINDS[number % 4][1](output.text), output.text
    ended = {number % 4 for number in range(16) if outputs[number].finish.reason == pb.FINISH_REASON_STOP}
    assert ended == {0, 1, 2, 3}, "of each kind some ended by themselves"
    assert outputs[16].token_ids == alone.token_ids


def test_an_output_that_is_cut_is_a_beginning(service: Tandem) -> None:
    (cut,) = run(service, request(pb.Constraint(regex="([a-z]{3},)+"), max_tokens=9))
    assert cut.finish.reason == pb.FINISH_REASON_LENGTH
    assert re.fullmatch("([a-z]{3},)*[a-z]{0,3}", cut.text)


def test_stop_strings_and_min_tokens_go_with_a_grammar(service: Tandem) -> None:
    stopping = request(pb.Constraint(regex="[a-z ]+"))
    stopping.stopping.stop.append("e")
    least = request(pb.Constraint(regex="[a-z ]+"))
    least.stopping.min_tokens, least.stopping.max_tokens = 20, 30
    forced = request(pb.Constraint(regex="(a|b)"))
    forced.stopping.min_tokens = 20
    stopped, long, short = run(service, stopping, least, forced)
    assert stopped.finish.stop == "e" and re.fullmatch("[a-df-z ]*", stopped.text)
    assert len(long.token_ids) >= 20
    assert short.text in ("a", "b"), "where the grammar allows nothing more, it ends"


def test_any_temperature_and_filter(service: Tandem) -> None:
    wanted = [request(pb.Constraint(regex="[0-9]{12}"), seed=n) for n in range(6)]
    for one, (temperature, top_k, top_p) in zip(wanted, [(0, 0, 1), (0.1, 1, 1), (2, 5, 1), (1, 0, 0.1)], strict=False):
        one.sampling.temperature, one.sampling.top_k, one.sampling.top_p = temperature, top_k, top_p
    assert all(re.fullmatch("[0-9]{12}", output.text) for output in run(service, *wanted))


def test_penalties_and_logprobs_beside_a_constraint(service: Tandem) -> None:
    """Logprobs are the model's own: what it would rather have said is likelier than the digits that it had to say."""
    with Client(service.endpoint) as client:
        said = client.complete(
            PROMPT, regex="[0-9]{8}", presence_penalty=1.5, repetition_penalty=1.3, logprobs=2, seed=1
        ).samples[0]
    assert re.fullmatch("[0-9]{8}", said.text)
    assert len(said.logprobs) == len(said.token_ids) and max(entry.rank for entry in said.logprobs) > 1


@pytest.mark.parametrize("role", ["rank", "core"])
def test_a_killed_process_changes_nothing(service: Tandem, role: str) -> None:
    survives(service, long_ones(), kill(service, role), kill(service, role))


def test_worker_and_core_die_together(service: Tandem) -> None:
    """The next core gets requests and masks before it knows any worker."""

    def both() -> None:
        kill(service, "launcher")()
        kill(service, "core")()

    survives(service, long_ones(), both)


def test_a_client_resumes_where_it_was(service: Tandem) -> None:
    wanted = request(pb.Constraint(json_schema=json.dumps(SCHEMA)))
    (whole,) = run(service, wanted)
    for cut in (1, len(whole.token_ids) // 2, len(whole.token_ids) - 1, len(whole.token_ids)):
        resumed = pb.GenerateRequest()
        resumed.CopyFrom(wanted)
        resumed.output_token_ids.ids.extend(whole.token_ids[:cut])
        (rest,) = run(service, resumed)
        assert whole.token_ids[:cut] + rest.token_ids == whole.token_ids
        assert rest.finish == whole.finish


def test_clients_that_leave(service: Tandem) -> None:
    """At any moment: while the grammar compiles, while a mask is made."""

    async def scenario() -> None:
        for delay in (0.0, 0.01, 0.05, 0.2):
            streams = [asyncio.create_task(disturbed(service, long_ones())) for _ in range(2)]
            await asyncio.sleep(delay)
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        await until_idle(service.endpoint)

    asyncio.run(scenario())


def test_the_client_library(service: Tandem) -> None:
    tools = [{"type": "function", "function": {"name": "dance", "parameters": SCHEMA}}, {"name": "walk"}]
    messages = [{"role": "user", "content": "Who are you?"}]
    with Client(service.endpoint) as client:
        assert valid_json(client.complete(PROMPT, json_schema=SCHEMA, seed=2).text)
        assert client.complete(PROMPT, choice=CHOICES).text in CHOICES
        assert re.fullmatch(
            "[0-9]+!", client.complete(PROMPT, regex="[0-9]+!", max_tokens=400, temperature=2.0, seed=1).text
        )
        assert client.complete(PROMPT, grammar='root ::= ("ab" | "c") "d"').text in ("abd", "cd")
        assert client.complete(PROMPT, json_object=True, max_tokens=8).text.startswith("{")
        named = {"type": "function", "function": {"name": "dance"}}
        said = client.complete(messages, tools=tools, tool_choice=named, parallel_tool_calls=False, seed=3).text
        call = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", said, re.DOTALL)
        assert (
            call and json.loads(call[1])["name"] == "dance" and valid_json(json.dumps(json.loads(call[1])["arguments"]))
        )
        with pytest.raises(InvalidRequest, match="only one of json_schema and regex"):
            client.complete(PROMPT, json_schema=SCHEMA, regex="a")
        with pytest.raises(InvalidRequest, match="unclosed group"):
            client.complete(PROMPT, regex="(")


GAP = r"(?: |\n[ \t]{0,32})?"
"""What may stand between the parts of JSON, as docs/constrain.md promises."""


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--json-schema", "schema.json"], rf"\{{{GAP}\"ok\"{GAP}:{GAP}(true|false){GAP}\}}"),
        (["--regex", "[ab]{3}"], "[ab]{3}"),
        (["--grammar", "grammar.lark"], "(ha)+!"),
        (["--choice", "yes", "--choice", "no, thanks"], "yes|no, thanks"),
    ],
)
def test_the_command_line(service: Tandem, tmp_path: Path, arguments: list[str], pattern: str) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    (tmp_path / "schema.json").write_text(json.dumps({**schema, "additionalProperties": False}))
    (tmp_path / "grammar.lark").write_text('start: "ha"+ "!"')
    words = [str(tmp_path / word) if word.endswith((".json", ".lark")) else word for word in arguments]
    command = [sys.executable, "-m", "tandem", "generate", PROMPT, "--endpoint", service.endpoint, *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(pattern, result.stdout.removesuffix("\n")), result.stdout


def test_the_page_s_examples(service: Tandem) -> None:
    page = Path("docs/constrain.md").read_text(encoding="utf-8")
    shell, python = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)[0] for kind in ("", "python"))
    said = [example(service, shlex.split(line)) for line in shell.splitlines()]
    assert said[0] in ("yes", "not at all") and re.fullmatch("[1-9][0-9]{3,4} pounds", said[1])
    code = python.replace("127.0.0.1:50051", service.endpoint)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert re.fullmatch(r"[A-Z][a-z]{2,12}\n(dance [A-Z][a-z]{2,12}\n)+", result.stdout), result


def example(service: Tandem, words: list[str]) -> str:
    assert words[0] == "tandem"
    command = [sys.executable, "-m", *words, "--endpoint", service.endpoint]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout.removesuffix(
        "\n"
    )


def test_a_file_that_is_not_there_is_one_line(service: Tandem) -> None:
    command = [sys.executable, "-m", "tandem", "generate", PROMPT, "--endpoint", service.endpoint]
    result = subprocess.run([*command, "--grammar", "/nowhere"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (result.returncode, result.stderr) == (3, "tandem: --grammar /nowhere: No such file or directory\n")
