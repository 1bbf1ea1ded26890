"""Rules for what points at something: Services, names that are dialled, objects that name others.

A rule takes all objects of a rendered overlay and gives sentences about what is wrong.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from shared.resolve import host_of
from tests.kubernetes.pods import Container, Pod, of_component, of_kind, pods, selects, title
from tests.kubernetes.rendered import Thing, Things

YOURS = {"tandem-tokens", "inference-gateway", "tandem-epp"}
"""What an operator makes, as the components' comments say: the clients' tokens, a Gateway, an endpoint picker."""
CLUSTER_WIDE = ("Namespace", "PriorityClass")
METRICS_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
"""A test of the service holds it equal to what is scraped."""


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


def references_exist(things: Things) -> Iterator[str]:
    """Whatever is named is among the objects, or is said to be the operator's."""
    there = {(thing["kind"], thing["metadata"]["name"]) for thing in things}
    there |= {("Secret", thing["spec"]["secretName"]) for thing in of_kind(things, "Certificate")}
    for owner, kind, name in _references(things):
        if (kind, name) not in there and name not in YOURS:
            yield f"{owner}: there is no {kind} {name}"


def _references(things: Things) -> Iterator[tuple[str, str, str]]:
    for pod in pods(things):
        yield pod.name, "ServiceAccount", pod.spec["serviceAccountName"]
        yield pod.name, "PriorityClass", pod.spec["priorityClassName"]
        for claim in pod.spec.get("resourceClaims", []):
            yield pod.name, "ResourceClaimTemplate", claim["resourceClaimTemplateName"]
        for volume in pod.spec["volumes"]:
            if "secret" in volume:
                yield pod.name, "Secret", volume["secret"]["secretName"]
            if "persistentVolumeClaim" in volume:
                yield pod.name, "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
        for source in pod.main.thing["envFrom"]:
            yield pod.name, "ConfigMap", source["configMapRef"]["name"]
    for thing in of_kind(things, "HorizontalPodAutoscaler", "ScaledObject"):
        yield title(thing), thing["spec"]["scaleTargetRef"]["kind"], thing["spec"]["scaleTargetRef"]["name"]
    for thing in of_kind(things, "Certificate"):
        yield title(thing), "Issuer", thing["spec"]["issuerRef"]["name"]
    for thing in of_kind(things, "InferencePool"):
        yield title(thing), "Service", thing["spec"]["endpointPickerRef"]["name"]
    for thing in of_kind(things, "HTTPRoute"):
        yield from ((title(thing), "Gateway", gateway["name"]) for gateway in thing["spec"]["parentRefs"])
        for rule in thing["spec"]["rules"]:
            yield from ((title(thing), backend["kind"], backend["name"]) for backend in rule["backendRefs"])


def all_is_in_one_namespace(things: Things) -> Iterator[str]:
    """But for what has none."""
    (namespace,) = (thing["metadata"]["name"] for thing in of_kind(things, "Namespace"))
    for thing in things:
        if thing["kind"] not in CLUSTER_WIDE and thing["metadata"].get("namespace") != namespace:
            yield f"{title(thing)}: is not in the namespace {namespace}"


def budgets_let_nodes_drain(things: Things) -> Iterator[str]:
    """A node can always be emptied, one pod of a kind at a time; every pod has a budget."""
    budgets = of_kind(things, "PodDisruptionBudget")
    for budget in budgets:
        spec = budget["spec"]
        if "minAvailable" in spec or spec.get("maxUnavailable") != 1:
            yield f"{title(budget)}: maxUnavailable is {spec.get('maxUnavailable')}, which may block a drain"
        if spec.get("unhealthyPodEvictionPolicy") != "AlwaysAllow":
            yield f"{title(budget)}: a pod that never gets ready blocks a drain"
    for pod in pods(things):
        if sum(selects(budget["spec"]["selector"]["matchLabels"], pod.labels) for budget in budgets) != 1:
            yield f"{pod.name}: has not exactly one budget"


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


def autoscalers_own_the_number(things: Things) -> Iterator[str]:
    """By metrics that there are; the number of pods is not set by two."""
    known = set(re.findall(r"`(tandem_\w+)`", METRICS_PAGE.read_text(encoding="utf-8")))
    for thing in of_kind(things, "HorizontalPodAutoscaler", "ScaledObject"):
        yield from (
            f"{title(thing)}: no metric {name}"
            for name in set(re.findall(r"tandem_\w+", str(thing["spec"])))
            if name not in known
        )
        reference = thing["spec"]["scaleTargetRef"]
        for target in things:
            is_scaled = (target["kind"], target["metadata"]["name"]) == (reference["kind"], reference["name"])
            if is_scaled and "replicas" in target["spec"]:
                yield f"{title(target)}: each apply would undo what {title(thing)} did"


def certificates_are_for_what_is_dialled(things: Things) -> Iterator[str]:
    """The names in --workers and --peers, where they are dialled in TLS, and files that a certificate's Secret has."""
    certificates = {thing["spec"]["secretName"]: thing["spec"] for thing in of_kind(things, "Certificate")}
    scheduler, worker = of_component(things, "scheduler"), of_component(things, "worker")
    for flag, target in dialled(scheduler.main):
        dialled_in_tls = scheduler.main.flag("peer-tls-ca" if flag == "peers" else "tls-ca") is not None
        server = scheduler if flag == "peers" else worker
        spec = certificates.get(_secret(server, server.main.flag("tls-cert", "")))
        if dialled_in_tls != (spec is not None):
            yield f"--{flag}={target}: one end speaks TLS, the other does not"
        elif spec is not None and host_of(target) not in spec["dnsNames"]:
            yield f"--{flag}={target}: the certificate is for {', '.join(spec['dnsNames'])}"
    for pod in (scheduler, worker):
        for flag in ("tls-cert", "tls-key", "tls-ca", "peer-tls-ca", "tls-client-ca"):
            path = pod.main.flag(flag)
            if path and (_secret(pod, path) not in certificates or Path(path).name not in _KEYS):
                yield f"{pod.name}: --{flag}={path}: no Secret of a certificate has this file"


_KEYS = ("tls.crt", "tls.key", "ca.crt")


def _secret(pod: Pod, path: str) -> str | None:
    """The Secret that a file comes from."""
    for mount in pod.main.thing["volumeMounts"]:
        if path.startswith(mount["mountPath"] + "/"):
            volume = next(volume for volume in pod.spec["volumes"] if volume["name"] == mount["name"])
            name: str | None = volume.get("secret", {}).get("secretName")
            return name
    return None


RULES = (
    services_reach_ports,
    headless_ports_are_the_containers,
    names_are_headless_services,
    references_exist,
    all_is_in_one_namespace,
    budgets_let_nodes_drain,
    scrapes_reach_metrics,
    autoscalers_own_the_number,
    certificates_are_for_what_is_dialled,
)
