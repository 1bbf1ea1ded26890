"""Rules for what names something else: an object, a metric, a certificate of a name that is dialled.

A rule takes all objects of a rendered overlay and gives sentences about what is wrong.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from shared.resolve import host_of
from tests.kubernetes.pods import Pod, of_component, of_kind, pods, title
from tests.kubernetes.rendered import Things
from tests.kubernetes.rules_services import dialled

YOURS = {"tandem-tokens", "inference-gateway", "tandem-epp"}
"""What an operator makes, as the components' comments say: the clients' tokens, a Gateway, an endpoint picker."""
CLUSTER_WIDE = ("Namespace", "PriorityClass")
METRICS_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
"""A test of the service holds it equal to what is scraped."""


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
    references_exist,
    all_is_in_one_namespace,
    autoscalers_own_the_number,
    certificates_are_for_what_is_dialled,
)
