"""Rules for what the programs are told: every flag, value and variable is one that the program takes.

A rule takes all objects of a rendered overlay and gives sentences about what is wrong.
"""

import ast
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from unittest.mock import patch

import typer
from typer.main import get_command

from scheduler_svc.config import SchedulerConfig
from shared.errors import StartupError
from tandem.cli import app
from tandem.options import settings_from
from tests.kubernetes.pods import LWS, Container, Pod, of_kind, pods
from tests.kubernetes.rendered import Things
from worker_svc.config import WorkerConfig

SETTINGS = {"scheduler": SchedulerConfig, "worker": WorkerConfig}
REFERENCE = re.compile(r"\$\((\w+)\)")
UsageError: type[Exception] = typer.BadParameter.__base__  # type: ignore[assignment]
"""Of typer, or of the click beneath it, as its version has it."""
ROOT = Path(__file__).parents[2]


def programs_take_their_arguments(things: Things) -> Iterator[str]:
    """Parsed by the real command, and accepted by the settings that it makes."""
    for pod in pods(things):
        words = list(arguments(pod.main, things))
        yield from (
            f"{pod.main.name}: {word} names a variable that is not set" for word in words if REFERENCE.search(word)
        )
        try:
            settings = parse(words, node_variables(pod))
        except (UsageError, StartupError) as error:
            yield f"{pod.main.name}: {error}"
        else:
            yield from (f"{pod.main.name}: {problem}" for problem in _group_problems(pod, settings))


def parse(words: list[str], variables: Mapping[str, str]) -> SchedulerConfig | WorkerConfig:
    """The settings of `tandem` with these words and variables. Raises UsageError and StartupError."""
    name, *rest = words
    command = get_command(app).commands[name]  # type: ignore[attr-defined]
    with patch.dict(os.environ, variables):
        options = command.make_context(name, rest).params
    settings: SchedulerConfig | WorkerConfig = settings_from(SETTINGS[name], options)
    return settings


def node_variables(pod: Pod) -> dict[str, str]:
    """What LeaderWorkerSet tells the pods of a group."""
    if f"{LWS}/name" not in pod.labels:
        return {}
    name = pod.labels[f"{LWS}/name"]
    return {
        "LWS_GROUP_SIZE": str(pod.owner["spec"]["leaderWorkerTemplate"]["size"]),
        "LWS_WORKER_INDEX": pod.labels[f"{LWS}/worker-index"],
        "LWS_LEADER_ADDRESS": f"{name}-0.{name}.tandem",
    }


def _group_problems(pod: Pod, settings: SchedulerConfig | WorkerConfig) -> Iterator[str]:
    """Whether the pods of a group know that they are one, and declare the port at which they meet."""
    if not isinstance(settings, WorkerConfig) or not (told := node_variables(pod)):
        return
    known = str(settings.nnodes), str(settings.node_rank), settings.master_addr
    if known != tuple(told.values()):
        yield f"takes itself for node {known} where it is {tuple(told.values())}"
    if settings.master_port not in pod.main.ports.values():
        yield f"its ranks meet at port {settings.master_port}, which is not declared"


def programs_read_their_variables(things: Things) -> Iterator[str]:
    """A variable stands in an argument, or is one that Tandem reads."""
    given: dict[str, str] = {}
    used: set[str] = set()
    for pod in pods(things):
        given |= dict.fromkeys(environment(pod.main, things), pod.main.name)
        used |= {name for word in pod.main.thing["args"] for name in REFERENCE.findall(word)}
    for name in given.keys() - used - read_by_tandem():
        yield f"{given[name]}: nothing reads the variable {name}"


def environment(container: Container, things: Things) -> dict[str, str]:
    """What the kubelet would set."""
    result: dict[str, str] = {}
    for source in container.thing.get("envFrom", []):
        for config in of_kind(things, "ConfigMap"):
            if config["metadata"]["name"] == source["configMapRef"]["name"]:
                result |= config["data"]
    return result | {one["name"]: one["value"] for one in container.thing.get("env", [])}


def arguments(container: Container, things: Things) -> Iterator[str]:
    """With the variables in them filled in, as the kubelet does; one that is not set stays as it stands."""
    variables = environment(container, things)
    for word in container.thing["args"]:
        yield REFERENCE.sub(lambda found: variables.get(found[1], found[0]), word)


@cache
def read_by_tandem() -> frozenset[str]:
    """The variables that Tandem's own code asks os.environ for."""
    folders = ("shared", "scheduler_svc", "worker_svc", "tandem")
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return frozenset(name for path in files for name in _asked_for(ast.parse(path.read_text(encoding="utf-8"))))


def _asked_for(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv") and node.args:
            name = node.args[0]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            name = node.slice
        else:
            continue
        if isinstance(name, ast.Constant):
            yield str(name.value)


RULES = (programs_take_their_arguments, programs_read_their_variables)
