"""Each rule sees what it is there for: a rendered overlay is broken in one place, and the rule says so."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from tests.kubernetes.pods import of_component, of_kind
from tests.kubernetes.rendered import Thing, Things, objects
from tests.kubernetes.rules_network import policies_admit_what_is_needed_alone
from tests.kubernetes.test_overlays import RULES, Rule


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


DAMAGES = (
    Damage(
        "selectors_are_the_templates_labels",
        "its selector is not among",
        lambda things: spec(things, "Deployment", "tandem-scheduler")["selector"]["matchLabels"].update(x="y"),
    ),
    Damage("mounts_are_declared", "no volume tmp", lambda things: pod(things)["volumes"].pop(0)),
    Damage("mounts_are_declared", "tmp is not mounted", lambda things: container(things)["volumeMounts"].pop(0)),
    Damage(
        "requests_fit_limits",
        "requests more memory",
        lambda things: container(things)["resources"]["requests"].update(memory="2049Mi"),
    ),
    Damage(
        "requests_fit_limits",
        "no limit of memory",
        lambda things: container(things)["resources"]["limits"].pop("memory"),
    ),
    Damage(
        "requests_fit_limits",
        "files in memory",
        lambda things: container(things)["resources"]["limits"].update(memory="512Mi"),
    ),
    Damage(
        "gpus_are_requested_whole",
        "requests 2 GPUs, its limit is 1",
        lambda things: container(things)["resources"]["requests"].update({"nvidia.com/gpu": "2"}),
        "gpu-1",
    ),
    Damage(
        "gpus_are_requested_whole",
        "4 ranks on 1 times 8",
        flag("worker", "--tensor-parallel=8", "--tensor-parallel=4"),
        "gpu-tp8",
    ),
    Damage("gpus_are_requested_whole", "the taint", lambda things: pod(things).pop("tolerations"), "gpu-1"),
    Damage("gpus_are_requested_whole", "without GPUs", lambda things: pod(things).pop("nodeSelector"), "lws-multinode"),
    Damage(
        "graces_cover_drains",
        "preStop sleeps 90 s of a grace of 90 s",
        lambda things: container(things, "scheduler")["lifecycle"]["preStop"]["sleep"].update(seconds=90),
    ),
    Damage(
        "graces_cover_drains",
        "may take 95 s",
        flag("scheduler", "--drain-timeout=60", "--drain-timeout=80"),
    ),
    Damage(
        "workers_outlast_schedulers",
        "drains for less than the 65 s",
        flag("worker", "--drain-timeout=70", "--drain-timeout=60"),
    ),
    Damage(
        "workers_outlast_schedulers",
        "is killed before",
        lambda things: pod(things).update(terminationGracePeriodSeconds=60),
        "lws-multinode",
    ),
    Damage("probes_ask_the_health_port", "a number from 1 to 65535", probe("livenessProbe", port=70000)),
    Damage("probes_ask_the_health_port", "a number from 1 to 65535", probe("readinessProbe", port="health")),
    Damage("probes_ask_the_health_port", "health is at 50062", probe("readinessProbe", port=50052)),
    Damage("probes_ask_the_health_port", "asks for 'ready'", probe("readinessProbe", service="ready")),
    Damage("probes_ask_the_health_port", "no livenessProbe", lambda things: container(things).pop("livenessProbe")),
    Damage(
        "pods_are_restricted",
        "runAsUser is 0",
        lambda things: pod(things)["securityContext"].update(runAsUser=0),
    ),
    Damage(
        "pods_are_restricted",
        "automountServiceAccountToken is not false",
        lambda things: pod(things).pop("automountServiceAccountToken"),
    ),
    Damage(
        "pods_are_restricted",
        "may gain",
        lambda things: container(things, "scheduler")["securityContext"]["capabilities"].pop("drop"),
    ),
    Damage(
        "pods_are_restricted",
        "readOnlyRootFilesystem",
        lambda things: container(things)["securityContext"].update(readOnlyRootFilesystem=False),
    ),
    Damage(
        "spread_counts_one_revision",
        "is spread by None",
        lambda things: pod(things)["topologySpreadConstraints"][0].pop("matchLabelKeys"),
    ),
    Damage(
        "rollouts_keep_serving",
        "no successor",
        lambda things: spec(things, "Deployment", "tandem-scheduler")["strategy"].update(
            rollingUpdate={"maxSurge": 0, "maxUnavailable": 1}
        ),
    ),
    Damage(
        "rollouts_keep_serving",
        "the ranks of a group would never meet again",
        lambda things: spec(things, "LeaderWorkerSet", "tandem-worker")["leaderWorkerTemplate"].update(
            restartPolicy="None"
        ),
        "lws-multinode",
    ),
    Damage(
        "images_are_of_this_version",
        "runs tandem-worker:latest",
        lambda things: container(things).update(image="tandem-worker:latest"),
    ),
    Damage(
        "services_reach_ports",
        "selects no pod",
        lambda things: spec(things, "Service", "tandem")["selector"].update(x="y"),
    ),
    Damage("services_reach_ports", "has no port http", port("tandem", targetPort="http")),
    Damage(
        "services_reach_ports",
        "port 50051 has no name",
        lambda things: spec(things, "Service", "tandem")["ports"][0].pop("name"),
    ),
    Damage("headless_ports_are_the_containers", "port 80 is 50052", port("tandem-workers", port=80)),
    Damage(
        "names_are_headless_services",
        "no headless Service",
        flag("scheduler", "--workers=dns:///tandem-workers:50052", "--workers=dns:///tandem:50052"),
    ),
    Damage(
        "names_are_headless_services",
        "no such port",
        flag("scheduler", "--peers=dns:///tandem-schedulers:50051", "--peers=dns:///tandem-schedulers:50061"),
    ),
    Damage(
        "names_are_headless_services",
        "would not be heard",
        lambda things: spec(things, "Service", "tandem-schedulers").pop("publishNotReadyAddresses"),
    ),
    Damage(
        "references_exist",
        "there is no ConfigMap other",
        lambda things: container(things)["envFrom"][0]["configMapRef"].update(name="other"),
    ),
    Damage(
        "references_exist",
        "there is no Secret tandem-worker-tls",
        lambda things: things.remove(one(things, "Certificate", "tandem-worker")),
        "cpu-demo+mtls",
    ),
    Damage(
        "references_exist",
        "there is no ResourceClaimTemplate",
        lambda things: things.remove(one(things, "ResourceClaimTemplate", "tandem-gpu")),
        "gpu-1+dra",
    ),
    Damage(
        "all_is_in_one_namespace",
        "Service tandem: is not",
        lambda things: one(things, "Service", "tandem")["metadata"].update(namespace="default"),
    ),
    Damage(
        "budgets_let_nodes_drain",
        "may block a drain",
        lambda things: spec(things, "PodDisruptionBudget", "tandem-worker").update(maxUnavailable=0),
    ),
    Damage(
        "budgets_let_nodes_drain",
        "never gets ready",
        lambda things: spec(things, "PodDisruptionBudget", "tandem-worker").pop("unhealthyPodEvictionPolicy"),
    ),
    Damage(
        "budgets_let_nodes_drain",
        "exactly one budget",
        lambda things: things.remove(one(things, "PodDisruptionBudget", "tandem-scheduler")),
    ),
    Damage(
        "scrapes_reach_metrics",
        "not that of --metrics-port",
        flag("worker", "--metrics-port=9100", "--metrics-port=9101"),
    ),
    Damage(
        "scrapes_reach_metrics",
        "has no port 9100",
        lambda things: spec(things, "PodMonitor", "tandem-worker")["podMetricsEndpoints"][0].update(port="9100"),
        "cpu-demo+monitoring",
    ),
    Damage(
        "autoscalers_own_the_number",
        "each apply would undo",
        lambda things: spec(things, "StatefulSet", "tandem-worker").update(replicas=2),
        "cpu-demo+autoscale-hpa",
    ),
    Damage(
        "autoscalers_own_the_number",
        "no metric tandem_queue",
        lambda things: spec(things, "ScaledObject", "tandem-worker")["triggers"][0]["metadata"].update(
            query="sum(tandem_queue)"
        ),
        "cpu-demo+autoscale-keda",
    ),
    Damage(
        "certificates_are_for_what_is_dialled",
        "the certificate is for worker",
        certificate_for("worker"),
        "cpu-demo+mtls",
    ),
    Damage(
        "certificates_are_for_what_is_dialled",
        "one end speaks TLS",
        lambda things: container(things, "scheduler")["args"].remove("--tls-ca=/tls/ca.crt"),
        "lws-multinode+mtls",
    ),
    Damage(
        "certificates_are_for_what_is_dialled",
        "has this file",
        flag("worker", "--tls-client-ca=/tls/ca.crt", "--tls-client-ca=/tls/ca.pem"),
        "cpu-demo+mtls",
    ),
    Damage("programs_take_their_arguments", "No such option", flag("worker", "--port=50052", "--prot=50052")),
    Damage(
        "programs_take_their_arguments",
        "--frontends 0: at least 1",
        flag("scheduler", "--frontends=$(FRONTENDS)", "--frontends=0"),
    ),
    Damage(
        "programs_take_their_arguments",
        "its ranks meet at port 29500",
        lambda things: container(things)["ports"].pop(),
        "lws-multinode",
    ),
    Damage(
        "programs_take_their_arguments",
        "a variable that is not set",
        lambda things: of_kind(things, "ConfigMap")[0]["data"].pop("MODEL"),
    ),
    Damage(
        "programs_read_their_variables",
        "nothing reads the variable TANDEM_LOGLEVEL",
        lambda things: of_kind(things, "ConfigMap")[0]["data"].update(TANDEM_LOGLEVEL="INFO"),
    ),
    Damage(
        "policies_admit_what_is_needed_alone",
        "Deployment tandem-scheduler does not reach StatefulSet tandem-worker at TCP 50052",
        drop("tandem-worker", "ingress"),
    ),
    Damage(
        "policies_admit_what_is_needed_alone",
        "StatefulSet tandem-worker does not reach DNS at UDP 53",
        drop("tandem-default", "egress"),
    ),
    Damage(
        "policies_admit_what_is_needed_alone",
        "a client reaches StatefulSet tandem-worker at TCP 50052",
        admit("tandem-worker", "ingress", ports=[{"protocol": "TCP", "port": 50052}]),
    ),
    Damage(
        "policies_admit_what_is_needed_alone",
        "a pretender reaches Deployment tandem-scheduler at TCP 50051",
        admit("tandem-scheduler", "ingress", **{"from": [{"namespaceSelector": {}}]}),
    ),
    Damage(
        "policies_admit_what_is_needed_alone",
        "LeaderWorkerSet tandem-worker, node 1 does not reach LeaderWorkerSet tandem-worker, node 0 at TCP 29500",
        lambda things: things.remove(one(things, "NetworkPolicy", "tandem-worker-ranks")),
        "lws-multinode",
    ),
)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: f"{damage.rule}: {damage.text}")
def test_a_rule_sees_the_damage(damage: Damage, texts: dict[str, str]) -> None:
    things = objects(texts[damage.overlay])
    damage.change(things)
    assert any(damage.text in problem for problem in rule_of(damage)(things))


def rule_of(damage: Damage) -> Rule:
    """By its name."""
    return next(rule for rule in RULES if rule.__name__ == damage.rule)


def test_every_rule_is_tried() -> None:
    assert {damage.rule for damage in DAMAGES} == {rule.__name__ for rule in RULES}


def test_a_policy_without_rules_shuts_and_none_at_all_opens(texts: dict[str, str]) -> None:
    """As Kubernetes has it: who is selected by no policy may do all."""
    things = objects(texts["cpu-demo"])
    open_to_all = [thing for thing in copy.deepcopy(things) if thing["kind"] != "NetworkPolicy"]
    assert "a stranger reaches Deployment tandem-scheduler at TCP 1" in [
        *policies_admit_what_is_needed_alone(open_to_all)
    ]
