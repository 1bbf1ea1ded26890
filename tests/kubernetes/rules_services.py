"""Rules for what is reached by name: Services, what a scheduler dials, what Prometheus scrapes.

A rule takes all objects of a rendered overlay and gives sentences about what is wrong.
"""

from collections.abc import Iterator

from shared.resolve import host_of
from tests.kubernetes.pods import Container, Pod, of_component, of_kind, pods, selects, title
from tests.kubernetes.rendered import Thing, Things


def services_reach_ports(things: Things) -> Iterator[str]:
    """Each Service selects pods, and each of its ports has a name and exists in all of them."""
    for service in of_kind(things, "Service"):
        chosen = selected(things, service)
        if not chosen:
            yield f"{title(service)}: selects no pod"
        for port in service["spec"]["ports"]:
            if "name" not in port:
                yield f"{title(service)}: port {port['port']} has no name"
            target = port.get("targetPort", port["port"])
            for pod in chosen:
                if target not in pod.main.ports and target not in pod.main.ports.values():
                    yield f"{title(service)}: {pod.name} has no port {target}"


def headless_ports_are_the_containers(things: Things) -> Iterator[str]:
    """Who resolves a headless Service dials the pod itself: the port must be the container's."""
    for service in of_kind(things, "Service"):
        if service["spec"].get("clusterIP") != "None":
            continue
        for port in service["spec"]["ports"]:
            for pod in selected(things, service):
                target = port.get("targetPort", port["port"])
                if pod.main.ports.get(target, target) != port["port"]:
                    yield f"{title(service)}: port {port['port']} is {target} of {pod.name}"


def services_tell_how_they_are_spoken_to(things: Things) -> Iterator[str]:
    """Meshes and gateways take h2c for HTTP/2 in plain text."""
    for service in of_kind(things, "Service"):
        is_plain = all(pod.main.flag("tls-cert") is None for pod in selected(things, service))
        for port in service["spec"]["ports"]:
            if port.get("appProtocol") != ("kubernetes.io/h2c" if is_plain else None):
                yield f"{title(service)}: its pods speak {'plain text' if is_plain else 'TLS'}"


def selected(things: Things, service: Thing) -> list[Pod]:
    """The pods behind a Service."""
    return [pod for pod in pods(things) if selects(service["spec"]["selector"], pod.labels)]


def names_are_headless_services(things: Things) -> Iterator[str]:
    """What a scheduler resolves has an address for each pod; peers see each other before they are ready."""
    headless = {thing["metadata"]["name"]: thing for thing in of_kind(things, "Service") if is_headless(thing)}
    for flag, target in dialled(of_component(things, "scheduler").main):
        service = headless.get(host_of(target))
        if service is None:
            yield f"--{flag}={target}: no headless Service has this name"
        elif int(target.rpartition(":")[2]) not in [port["port"] for port in service["spec"]["ports"]]:
            yield f"--{flag}={target}: the Service has no such port"
        elif flag == "peers" and not service["spec"].get("publishNotReadyAddresses"):
            yield f"--{flag}={target}: a peer that is not ready would not be heard"
    for thing in of_kind(things, "StatefulSet"):
        if thing["spec"]["serviceName"] not in headless:
            yield f"{title(thing)}: no headless Service {thing['spec']['serviceName']}"


def dialled(scheduler: Container) -> Iterator[tuple[str, str]]:
    """Flags and targets of what a scheduler dials."""
    for flag in ("workers", "peers"):
        yield from ((flag, target) for target in scheduler.flag(flag, "").split(",") if target)


def is_headless(service: Thing) -> bool:
    """Whether its name has an address for each pod."""
    return bool(service["spec"].get("clusterIP") == "None")


def scrapes_reach_metrics(things: Things) -> Iterator[str]:
    """A PodMonitor names a port, which is that of --metrics-port."""
    for pod in pods(things):
        if str(pod.main.ports.get("metrics")) != pod.main.flag("metrics-port"):
            yield f"{pod.name}: its port metrics is not that of --metrics-port"
    for monitor in of_kind(things, "PodMonitor"):
        chosen = [pod for pod in pods(things) if selects(monitor["spec"]["selector"]["matchLabels"], pod.labels)]
        if not chosen:
            yield f"{title(monitor)}: selects no pod"
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            yield from (
                f"{title(monitor)}: {pod.name} has no port {endpoint['port']}"
                for pod in chosen
                if endpoint["port"] not in pod.main.ports
            )


RULES = (
    services_reach_ports,
    headless_ports_are_the_containers,
    services_tell_how_they_are_spoken_to,
    names_are_headless_services,
    scrapes_reach_metrics,
)
