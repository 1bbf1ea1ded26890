"""Looks things up in rendered objects: pods of whatever makes them, their containers, arguments and ports."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.kubernetes.rendered import Thing, Things

_TEMPLATES = {
    "Deployment": ("template",),
    "StatefulSet": ("template",),
    "LeaderWorkerSet": ("leaderWorkerTemplate", "workerTemplate"),
}
LWS = "leaderworkerset.sigs.k8s.io"


@dataclass(frozen=True)
class Pod:
    """A pod as its controller would make it; of a LeaderWorkerSet the leader or, with number 1, the next one."""

    owner: Thing
    template: Thing
    labels: Mapping[str, str]

    @property
    def name(self) -> str:
        """Of what makes it, for messages."""
        return f"{self.owner['kind']} {self.owner['metadata']['name']}"

    @property
    def spec(self) -> Thing:
        """The pod's own."""
        spec: Thing = self.template["spec"]
        return spec

    @property
    def main(self) -> "Container":
        """The container that runs a program of Tandem."""
        return next(container for container in self.containers() if not container.is_init)

    def containers(self) -> Iterator["Container"]:
        """Init containers first."""
        for key in ("initContainers", "containers"):
            for container in self.spec.get(key, []):
                yield Container(container, is_init=key == "initContainers", owner=self.name)


@dataclass(frozen=True)
class Container:
    """One container of a pod."""

    thing: Thing
    is_init: bool
    owner: str
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"{self.owner}, container {self.thing['name']}")

    @property
    def ports(self) -> dict[str, int]:
        """Numbers by name."""
        return {port["name"]: port["containerPort"] for port in self.thing.get("ports", [])}

    def flag(self, name: str, default: Any = None) -> Any:
        """The value of --name=value among its arguments."""
        prefix = f"--{name}="
        given = [word.removeprefix(prefix) for word in self.thing.get("args", []) if word.startswith(prefix)]
        return given[-1] if given else default

    def probes(self) -> Iterator[tuple[str, Thing]]:
        """By name, those that it has."""
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            if kind in self.thing:
                yield kind, self.thing[kind]


def pods(things: Things) -> Iterator[Pod]:
    """One for each different pod."""
    for thing in things:
        if thing["kind"] not in _TEMPLATES:
            continue
        template: Thing = thing["spec"]
        for key in _TEMPLATES[thing["kind"]]:
            template = template[key]
        labels = template["metadata"]["labels"]
        if thing["kind"] == "LeaderWorkerSet":
            for index in range(min(2, thing["spec"]["leaderWorkerTemplate"]["size"])):
                given = {f"{LWS}/name": thing["metadata"]["name"], f"{LWS}/worker-index": str(index)}
                yield Pod(thing, template, {**labels, **given})
        else:
            yield Pod(thing, template, labels)


def of_component(things: Things, component: str) -> Pod:
    """The pods of `scheduler` or `worker`: one for all."""
    return next(pod for pod in pods(things) if pod.labels["app.kubernetes.io/component"] == component)


def of_kind(things: Things, *kinds: str) -> Things:
    """All objects of these kinds."""
    return [thing for thing in things if thing["kind"] in kinds]


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether all of the selector's labels are there."""
    return selector.items() <= labels.items()


def title(thing: Thing) -> str:
    """Kind and name, for messages."""
    return f"{thing['kind']} {thing['metadata']['name']}"


_UNITS = {
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
}


def quantity(text: str | int) -> float:
    """A quantity of Kubernetes as a number: 250m is 0.25, 1Ki is 1024."""
    digits = str(text).rstrip("KMGTikm")
    suffix = str(text)[len(digits) :]
    return float(digits) * (_UNITS[suffix] if suffix else 1.0)
