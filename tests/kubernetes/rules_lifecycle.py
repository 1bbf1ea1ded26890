"""Rules for how pods begin and end: what would let a drain cut streams, or keep a node from being emptied.

A rule takes all objects of a rendered overlay and gives sentences about what is wrong.
"""

from collections.abc import Iterator

from tests.kubernetes.pods import Container, of_component, of_kind, pods, selects, title
from tests.kubernetes.rendered import Things

STOPPING_S = 10
"""From the end of a drain to the end of all processes: a worker gives its ranks five, a scheduler its own two."""


def graces_cover_drains(things: Things) -> Iterator[str]:
    """The sleep before SIGTERM, the drain and the end of all processes fit the grace period."""
    for pod in pods(things):
        grace, sleep = pod.spec["terminationGracePeriodSeconds"], _sleep(pod.main)
        if sleep >= grace:
            yield f"{pod.name}: preStop sleeps {sleep} s of a grace of {grace} s, which the API server refuses"
        if (needed := sleep + _drain(pod.main) + STOPPING_S) > grace:
            yield f"{pod.name}: a drain may take {needed:g} s, its grace is {grace} s"


def workers_outlast_schedulers(things: Things) -> Iterator[str]:
    """When all pods are stopped at once, streams end only when the scheduler has drained them."""
    scheduler, worker = of_component(things, "scheduler"), of_component(things, "worker")
    drained = _sleep(scheduler.main) + _drain(scheduler.main)
    if _sleep(worker.main) + _drain(worker.main) < drained:
        yield f"{worker.name}: drains for less than the {drained:g} s of the scheduler"
    if worker.spec["terminationGracePeriodSeconds"] < drained:
        yield f"{worker.name}: is killed before the scheduler has drained, after {drained:g} s"


def _sleep(container: Container) -> int:
    seconds: int = container.thing.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    return seconds


def _drain(container: Container) -> float:
    return float(container.flag("drain-timeout", 30))


def probes_ask_the_health_port(things: Things) -> Iterator[str]:
    """All three probes, by number, at the port of --health-port, which the container declares."""
    for pod in pods(things):
        container = pod.main
        probes = dict(container.probes())
        yield from (f"{container.name}: no {kind}" for kind in _PROBES if kind not in probes)
        for kind, probe in probes.items():
            port, service = probe["grpc"]["port"], probe["grpc"].get("service")
            if not (isinstance(port, int) and 1 <= port <= 65535):
                yield f"{container.name}: {kind} at port {port!r}: a number from 1 to 65535 is needed"
            elif port not in container.ports.values() or str(port) != container.flag("health-port"):
                yield f"{container.name}: {kind} at port {port}, health is at {container.flag('health-port')}"
            if service not in _PROBES[kind]:
                yield f"{container.name}: {kind} asks for {service!r}, not for {' or '.join(_PROBES[kind])}"


_PROBES = {"startupProbe": ("liveness", "readiness"), "readinessProbe": ("readiness",), "livenessProbe": ("liveness",)}


def rollouts_keep_serving(things: Things) -> Iterator[str]:
    """A scheduler has its successor before it ends; a worker's GPUs have no spare."""
    for thing in things:
        spec = thing.get("spec", {})
        if thing["kind"] == "Deployment" and spec["strategy"]["rollingUpdate"] != {"maxSurge": 1, "maxUnavailable": 0}:
            yield f"{title(thing)}: a rollout has no successor ready"
        if thing["kind"] == "StatefulSet" and spec.get("podManagementPolicy") != "Parallel":
            yield f"{title(thing)}: a pod that does not start keeps the next one from starting"
        if thing["kind"] == "LeaderWorkerSet":
            rolling, group = spec["rolloutStrategy"]["rollingUpdateConfiguration"], spec["leaderWorkerTemplate"]
            if rolling != {"maxUnavailable": 1, "maxSurge": 0}:
                yield f"{title(thing)}: a rollout asks for GPUs that are not there"
            if (group["restartPolicy"], spec["startupPolicy"]) != ("RecreateGroupOnPodRestart", "LeaderCreated"):
                yield f"{title(thing)}: the ranks of a group would never meet again"


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


RULES = (
    graces_cover_drains,
    workers_outlast_schedulers,
    probes_ask_the_health_port,
    rollouts_keep_serving,
    budgets_let_nodes_drain,
)
