"""A rule for NetworkPolicies: they admit what the Services need and nothing else.

All connections among the pods of an overlay, and between them and others in the cluster, are tried at all ports, by the
rules that Kubernetes has for policies.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

from shared.resolve import host_of
from tests.kubernetes.pods import LWS, Pod, of_component, of_kind, pods, selects
from tests.kubernetes.rendered import Thing, Things
from tests.kubernetes.rules_services import dialled, selected

OWN = "tandem"
UNUSED = ("TCP", 1)
"""A port that nobody listens on: what is admitted there is admitted everywhere."""


@dataclass(frozen=True)
class End:
    """Something with an address: a pod, here or elsewhere in the cluster."""

    name: str
    namespace: str
    labels: Mapping[str, str]
    namespace_labels: Mapping[str, str]


def end(name: str, namespace: str = OWN, labels: Mapping[str, str] | None = None, **namespace_labels: str) -> End:
    """One in a namespace with the labels that every namespace has, and these."""
    own = {
        "kubernetes.io/metadata.name": namespace,
        **{key.replace("_", "-"): v for key, v in namespace_labels.items()},
    }
    return End(name, namespace, labels or {}, own)


CLIENT = end("a client", "clients", tandem_client="true")
DNS = end("DNS", "kube-system", {"k8s-app": "kube-dns"})
PROMETHEUS = end("Prometheus", "monitoring")
GATEWAY = end("the gateway", "gateway-system")
PICKER = end("the endpoint picker", labels={"inferencepool": "tandem-epp"})
STRANGERS = (
    end("a stranger"),
    end("a stranger elsewhere", "elsewhere"),
    end("a stranger with a label", labels={"tandem-client": "true"}),
    end("a pretender", "elsewhere", {"tandem-client": "true"}),
)
OTHERS = (CLIENT, DNS, PROMETHEUS, GATEWAY, PICKER, *STRANGERS)

Flow: TypeAlias = tuple[str, str, tuple[str, int] | None]
"""From whom, to whom, protocol and port; None: all."""


def policies_admit_what_is_needed_alone(things: Things) -> Iterator[str]:
    """Both ends' policies count."""
    policies = of_kind(things, "NetworkPolicy")
    ours = {_name(pod): end(_name(pod), labels=pod.labels) for pod in pods(things)}
    picker_runs = bool(of_kind(things, "InferencePool"))
    ends = [*ours.values(), *OTHERS]
    ports = {("TCP", port) for pod in pods(things) for port in pod.main.ports.values()}
    ports |= {("TCP", 53), ("UDP", 53), ("TCP", 9002), UNUSED}
    needed = set(_needed(things))
    for source, target, port in product(ends, ends, sorted(ports)):
        if {source.name, target.name}.isdisjoint(ours) and not (picker_runs and PICKER in (source, target)):
            continue
        wanted = not needed.isdisjoint([(source.name, target.name, port), (source.name, target.name, None)])
        admitted = _admits(policies, source, target, *port)
        if admitted != wanted:
            yield f"{source.name} {'reaches' if admitted else 'does not reach'} {target.name} at {port[0]} {port[1]}"


def _name(pod: Pod) -> str:
    index = pod.labels.get(f"{LWS}/worker-index")
    return pod.name if index is None else f"{pod.name}, node {index}"


def _needed(things: Things) -> Iterator[Flow]:
    scheduler = _name(of_component(things, "scheduler"))
    services = {service["metadata"]["name"]: service for service in of_kind(things, "Service")}
    for _, target in dialled(of_component(things, "scheduler").main):
        yield from (
            (scheduler, _name(pod), _tcp(target.rpartition(":")[2]))
            for pod in selected(things, services[host_of(target)])
        )
    for port in services["tandem"]["spec"]["ports"]:
        number = of_component(things, "scheduler").main.ports[port["targetPort"]]
        yield CLIENT.name, scheduler, _tcp(number)
    for pod in pods(things):
        yield from ((_name(pod), DNS.name, (protocol, 53)) for protocol in ("TCP", "UDP"))
        if of_kind(things, "PodMonitor"):
            yield PROMETHEUS.name, _name(pod), _tcp(pod.main.ports["metrics"])
    group = [pod for pod in pods(things) if f"{LWS}/name" in pod.labels]
    yield from ((_name(one), _name(other), None) for one, other in product(group, group))  # NCCL and gloo choose ports
    for pool in of_kind(things, "InferencePool"):
        yield from ((GATEWAY.name, scheduler, _tcp(port["number"])) for port in pool["spec"]["targetPorts"])
        yield GATEWAY.name, PICKER.name, _tcp(pool["spec"]["endpointPickerRef"]["port"]["number"])
        yield PICKER.name, scheduler, _tcp(of_component(things, "scheduler").main.ports["metrics"])
        yield from ((PICKER.name, DNS.name, (protocol, 53)) for protocol in ("TCP", "UDP"))


def _tcp(port: str | int) -> tuple[str, int]:
    return "TCP", int(port)


def _admits(policies: Things, source: End, target: End, protocol: str, port: int) -> bool:
    """Whether a connection comes about: the source may send it, and the target take it."""
    return all(
        _one_way(policies, whose, other, protocol, port, direction)
        for whose, other, direction in ((source, target, "Egress"), (target, source, "Ingress"))
    )


def _one_way(policies: Things, whose: End, other: End, protocol: str, port: int, direction: str) -> bool:
    """Policies are of one namespace. Whom none selects may do all; else one rule must allow it."""
    if whose.namespace != OWN:
        return True
    selecting = [
        policy["spec"]
        for policy in policies
        if direction in policy["spec"]["policyTypes"] and _matches(policy["spec"]["podSelector"], whose.labels)
    ]
    key, peers = ("egress", "to") if direction == "Egress" else ("ingress", "from")
    rules = [rule for spec in selecting for rule in spec.get(key, [])]
    return not selecting or any(_allows(rule, rule.get(peers), other, protocol, port) for rule in rules)


def _allows(rule: Thing, peers: list[Thing] | None, other: End, protocol: str, port: int) -> bool:
    """A rule without ports or peers is for all of them."""
    allowed = rule.get("ports")
    if allowed is not None and (protocol, port) not in [(one["protocol"], one["port"]) for one in allowed]:
        return False
    return peers is None or any(_is_peer(peer, other) for peer in peers)


def _is_peer(peer: Thing, other: End) -> bool:
    """Without a namespaceSelector pods of the policy's own namespace are meant; addresses are those of no pod here."""
    if "ipBlock" in peer:
        return False
    if "namespaceSelector" in peer:
        here = _matches(peer["namespaceSelector"], other.namespace_labels)
    else:
        here = other.namespace == OWN
    return here and _matches(peer.get("podSelector", {}), other.labels)


def _matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    assert not selector.keys() - {"matchLabels"}, f"this reads matchLabels alone: {selector}"
    return selects(selector.get("matchLabels", {}), labels)


RULES = (policies_admit_what_is_needed_alone,)
