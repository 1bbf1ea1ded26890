"""Ways to break a rendered overlay in one place, and the sentence that a rule must say of it."""

import dataclasses
from collections.abc import Callable
from typing import Any

from tests.kubernetes.pods import of_component, of_kind
from tests.kubernetes.rendered import Thing, Things


@dataclasses.dataclass(frozen=True)
class Damage:
    """What is done to an overlay, and the sentence that must come of it."""

    rule: str
    text: str
    change: Callable[[Things], Any]
    overlay: str = "cpu-demo"


def one(things: Things, kind: str, name: str) -> Thing:
    """An object by kind and name."""
    return next(thing for thing in of_kind(things, kind) if thing["metadata"]["name"] == name)


def pod(things: Things, component: str = "worker") -> Thing:
    """The pods' spec of a component."""
    return of_component(things, component).spec


def container(things: Things, component: str = "worker") -> Thing:
    """The container that runs a program."""
    return of_component(things, component).main.thing


def spec(things: Things, kind: str, name: str) -> Thing:
    """An object's spec."""
    result: Thing = one(things, kind, name)["spec"]
    return result


def flag(component: str, old: str, new: str) -> Callable[[Things], None]:
    """An argument is another one."""

    def change(things: Things) -> None:
        words = container(things, component)["args"]
        words[words.index(old)] = new

    return change


def port(service: str, **values: Any) -> Callable[[Things], None]:
    """The first port of a Service is another one."""
    return lambda things: spec(things, "Service", service)["ports"][0].update(values)


def probe(kind: str, **values: Any) -> Callable[[Things], None]:
    """A worker's probe asks for something else."""
    return lambda things: container(things)[kind]["grpc"].update(values)


def admit(policy: str, key: str, **rule: Any) -> Callable[[Things], None]:
    """A policy has one rule more."""
    return lambda things: spec(things, "NetworkPolicy", policy).setdefault(key, []).append(rule)


def drop(policy: str, key: str) -> Callable[[Things], None]:
    """A policy has no rules."""
    return lambda things: spec(things, "NetworkPolicy", policy).update({key: []})


def certificate_for(name: str) -> Callable[[Things], None]:
    """The worker's certificate is for another name."""
    return lambda things: spec(things, "Certificate", "tandem-worker").update(dnsNames=[name])
