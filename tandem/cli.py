"""The command `tandem`: parses, wires, and turns errors into one line. The work is elsewhere.

Imports no torch: only the ranks of a worker do. What one command alone needs is imported where it begins: every
process of a service starts here.
"""

import asyncio
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from scheduler_svc.config import SchedulerConfig
from shared.errors import StartupError, TandemError
from shared.model_config import load_model_config
from shared.process import STARTUP_FAILED, die_with_parent
from shared.security import ClientSecurity
from shared.telemetry import configure_logging
from tandem import gateway
from tandem import serve as serving
from tandem.client import DEFAULT_ENDPOINT
from tandem.help import RUN, USE, Command, Commands, examples
from tandem.models import BUILT_IN, model_folder
from tandem.options import given_options, parameters, request_parameters, settings_from, taken, with_parameters
from tandem.requests import GenerateOptions
from tandem.tools import SECURITY, Endpoint, register
from worker_svc.config import WorkerConfig

app = typer.Typer(
    cls=Commands,
    help="Serves Qwen3 language models: a CPU-only scheduler and workers that talk gRPC.",
    epilog=examples(
        "tandem serve --model tiny",
        'tandem generate "It is a truth universally acknowledged"',
        "tandem COMMAND --help",
        "tandem --install-completion   # for the shell that you are in",
    ),
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str,
    typer.Option(
        help="Model folder, or 'tiny' or 'tiny-moe': small trained models in the package.",
        autocompletion=lambda: list(BUILT_IN),  # and what the shell itself completes: folders
    ),
]


def _serve(model: Model = "tiny", **options: Any) -> None:
    """Serves a model on this machine: a scheduler and its workers, each restarted when it dies.

    Prints one line when ready. Ctrl-C stops all of it; a second Ctrl-C does not wait for running streams.
    """
    configure_logging("serve")
    raise typer.Exit(asyncio.run(serving.run(*_serve_settings(model, options))))


GatewayOptions = Annotated[list[str] | None, typer.Argument(help="Further options of the gateway, after --.")]


def _openai(gateway_options: GatewayOptions = None, model: Model = "tiny", **options: Any) -> None:
    """Serves a model with OpenAI's HTTP API: `tandem serve` behind the gateway smg.

    Needs pip install 'tandem-serve[gateway]'.

    Prints one line when ready. Ctrl-C stops all of it; a second Ctrl-C does not wait for running streams.
    """
    configure_logging("openai")
    config = taken(options, gateway.GatewayConfig)
    gateway.require_installed()
    settings = _serve_settings(model, options)
    raise typer.Exit(asyncio.run(gateway.run(config, gateway_options or [], *settings)))


def _serve_settings(model: str, options: dict[str, Any]) -> tuple[serving.ServeConfig, str, list[str], list[str]]:
    """What is wrong is told once, before a process is started that would tell it too."""
    folder = model_folder(model)
    config = taken(options, serving.ServeConfig)
    scheduler, worker = _given(options, SchedulerConfig), _given(options, WorkerConfig)
    load_model_config(folder)
    SchedulerConfig(model=folder, workers=(DEFAULT_ENDPOINT,), **scheduler)
    WorkerConfig(model=str(folder), **worker)
    return config, model, _arguments(scheduler), _arguments(worker)


def _given(options: dict[str, Any], settings: type[Any]) -> dict[str, Any]:
    """The options that were given and that the settings know."""
    return {field.name: options[field.name] for field in fields(settings) if options.get(field.name) is not None}


def _arguments(given: dict[str, Any]) -> list[str]:
    """The same as words of a command line."""
    words = []
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return words


def _scheduler(**options: Any) -> None:
    """Runs a scheduler for workers that run elsewhere. Needs no GPU and no torch."""
    from scheduler_svc.main import run

    configure_logging("scheduler")
    options["model"] = model_folder(options["model"])
    raise typer.Exit(asyncio.run(run(settings_from(SchedulerConfig, options))))


def _worker(**options: Any) -> None:
    """Runs one worker group, all ranks of one replica of the model; with --nnodes this node's ranks of it."""
    from worker_svc.main import run

    configure_logging("worker")
    options["model"] = str(model_folder(options["model"]))
    raise typer.Exit(run(settings_from(WorkerConfig, options)))


LEADER_WORKER_SET = {
    "nnodes": "LWS_GROUP_SIZE",
    "node_rank": "LWS_WORKER_INDEX",
    "master_addr": "LWS_LEADER_ADDRESS",
}
"""What Kubernetes' LeaderWorkerSet tells each pod of a group."""
SERVE_SETS = (
    *("peers", "peer_timeout", "peer_tls_ca", "drain"),
    *("model", "workers", "host", "port", "metrics_port", "health_port", "drain_timeout"),
    *("tls_cert", "tls_key", "tls_client_ca", "token_file", "tls_ca", "tls_server_name", "worker_token_file"),
    *("nnodes", "node_rank", "master_addr", "master_port"),
)
"""Of scheduler and workers: what `tandem serve` has flags of its own for, or decides."""
HANDED_ON = [
    *parameters(SchedulerConfig, without=SERVE_SETS, optional=True, heading="The scheduler"),
    *parameters(WorkerConfig, without=SERVE_SETS, optional=True, heading="Each worker"),
]
app.command(
    "serve",
    cls=Command,
    rich_help_panel=RUN,
    epilog=examples("tandem serve --model tiny", "tandem serve --model /models/Qwen3-8B --tensor-parallel 2"),
)(with_parameters(_serve, [*parameters(serving.ServeConfig), *HANDED_ON]))
app.command(
    "openai",
    cls=Command,
    rich_help_panel=RUN,
    epilog=examples("tandem openai --model tiny"),
)(
    with_parameters(
        _openai,
        [*parameters(gateway.GatewayConfig), *parameters(serving.ServeConfig, without=gateway.NOT_OFFERED), *HANDED_ON],
    )
)
app.command(
    "scheduler",
    cls=Command,
    rich_help_panel=RUN,
    epilog=examples("tandem scheduler --model tiny --workers 10.0.0.2:50052,10.0.0.3:50052 --host 0.0.0.0"),
)(with_parameters(_scheduler, parameters(SchedulerConfig)))
app.command(
    "worker",
    cls=Command,
    rich_help_panel=RUN,
    epilog=examples("tandem worker --model tiny --host 0.0.0.0 --port 50052"),
)(with_parameters(_worker, parameters(WorkerConfig, variables=LEADER_WORKER_SET)))


SAMPLING = (
    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "allowed_token_ids"),
    *("seed", "stop", "include_stop_str_in_output", "skip_special_tokens", "ignore_eos"),
)
"""What both commands take of GenerateOptions."""


def _generate(
    text: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    json: Annotated[bool, typer.Option("--json", help="Prints one JSON object per piece, logprobs too.")] = False,
    json_schema: Annotated[Path | None, typer.Option(help="File with a JSON schema for the output.")] = None,
    regex: Annotated[str | None, typer.Option(help="Regular expression that matches the whole output.")] = None,
    grammar: Annotated[Path | None, typer.Option(help="File with a grammar for the output, Lark or EBNF.")] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="One of the possible outputs; give it several times.")
    ] = None,
    **options: Any,
) -> None:
    """Streams the continuation of a prompt."""
    from tandem import talk

    prompt = sys.stdin.read() if text == "-" else text
    security = taken(options, ClientSecurity)
    options |= {"json_schema": _text("--json-schema", json_schema), "grammar": _text("--grammar", grammar)}
    options |= {"regex": regex, "choice": choice}
    talk.generate(endpoint, security, prompt, as_json=json, **given_options(options))


def _text(flag: str, file: Path | None) -> str | None:
    try:
        return file.read_text(encoding="utf-8") if file else None
    except OSError as error:
        raise StartupError(f"{flag} {file}: {error.strerror}") from None


def _chat(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    system: Annotated[str | None, typer.Option(help="A system message before the first turn.")] = None,
    **options: Any,
) -> None:
    """Talks with the model, turn by turn. Ends with Ctrl-D."""
    from tandem import talk

    security = taken(options, ClientSecurity)
    talk.chat(endpoint, security, system=system, **given_options(options))


app.command(
    "generate",
    cls=Command,
    rich_help_panel=USE,
    epilog=examples('tandem generate "It is" --max-tokens 32 --seed 1', "tandem generate - --json < prompt.txt"),
)(
    with_parameters(
        _generate,
        [*request_parameters(GenerateOptions, (*SAMPLING, "echo", "logprobs", "prompt_logprobs")), *SECURITY],
    )
)
app.command("chat", cls=Command, rich_help_panel=USE, epilog=examples('tandem chat --system "You are brief."'))(
    with_parameters(_chat, [*request_parameters(GenerateOptions, SAMPLING), *SECURITY])
)


register(app)


def main() -> int:
    """Runs the command and exits; the status of an error, which is one line on standard error."""
    die_with_parent()
    try:
        app(prog_name="tandem")
    except StartupError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return STARTUP_FAILED
    except UnicodeError as error:
        print(f"tandem: text that is not UTF-8, or that this terminal can't show: {error}", file=sys.stderr)
        return 1
    except TandemError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # a file that is not there, no folder for temporary files, no room for the output
        print(f"tandem: {f'{error.filename}: ' if error.filename else ''}{error.strerror or error}", file=sys.stderr)
        return 1
    return 0
