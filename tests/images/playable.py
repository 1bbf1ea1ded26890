"""What `podman kube play` 4.3 can take of a rendered overlay: its pods, told what a cluster would tell them.

It knows no StatefulSet, no Service and no probe by gRPC, puts no variable into an argument, publishes every port that
is named on all addresses of the machine, and lets all pods share the emptyDir of a name.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

Thing = dict[str, Any]


@dataclass
class Pod:
    """A pod of a Deployment or a StatefulSet, with one container."""

    name: str
    labels: Thing
    spec: Thing
    configuration: Sequence[Thing]
    services: list[str] = field(default_factory=list)
    """Names under which the overlay's headless Services have it."""
    address: str = ""

    @property
    def container(self) -> str:
        """Podman's name of its container."""
        return f"{self.name}-{self.spec['containers'][0]['name']}"

    @property
    def arguments(self) -> list[str]:
        """Of its program; may be added to."""
        arguments: list[str] = self.spec["containers"][0]["args"]
        return arguments

    @property
    def readiness(self) -> tuple[int, str]:
        """Port and service of its probe."""
        probe = self.spec["containers"][0]["readinessProbe"]["grpc"]
        return probe["port"], probe["service"]

    def text(self) -> str:
        """The YAML that is played."""
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": self.name, "labels": self.labels}}
        return yaml.safe_dump_all([*self.configuration, {**pod, "spec": self.spec}])


def playable(things: Sequence[Thing]) -> list[Pod]:
    """The pods of an overlay, its objects given, those without a controller of pods left out."""
    maps = [thing for thing in things if thing["kind"] == "ConfigMap"]
    services = [thing for thing in things if thing["kind"] == "Service" and thing["spec"].get("clusterIP") == "None"]
    pods = []
    for thing in things:
        if thing["kind"] in ("Deployment", "StatefulSet"):
            for number in range(thing["spec"]["replicas"]):
                pods.append(_pod(f"{thing['metadata']['name']}-{number}", thing["spec"]["template"], maps, services))
    return pods


def _pod(name: str, template: Thing, maps: Sequence[Thing], services: Sequence[Thing]) -> Pod:
    labels = template["metadata"]["labels"]
    spec = yaml.safe_load(yaml.safe_dump(template["spec"]))
    values = {key: value for thing in maps for key, value in thing["data"].items()}
    spec["restartPolicy"] = "Never"  # so that it can be seen how a container ended
    for container in spec["containers"]:
        container["args"] = [_expanded(argument, values) for argument in container["args"]]
        container["image"] = f"localhost/{container['image']}"
        del container["ports"]
        for mount in container["volumeMounts"]:
            mount["name"] = f"{name}-{mount['name']}"
    for volume in spec["volumes"]:
        volume["name"] = f"{name}-{volume['name']}"
    names = [thing["metadata"]["name"] for thing in services if thing["spec"]["selector"].items() <= labels.items()]
    return Pod(name, labels, spec, maps, names)


def _expanded(argument: str, values: Mapping[str, str]) -> str:
    """With the value of each $(NAME)."""
    return re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], argument)
