"""Rules for what runs: what the API server refuses, and what would let a drain cut streams.

A rule takes all objects of a rendered overlay and gives sentences about what is wrong.
"""

from collections.abc import Iterator

from shared import __version__
from tests.kubernetes.pods import Container, of_component, of_kind, pods, quantity, selects, title
from tests.kubernetes.rendered import Things

STOPPING_S = 10
"""From the end of a drain to the end of all processes: a worker gives its ranks five, a scheduler its own two."""
GPU = "nvidia.com/gpu"


def selectors_are_the_templates_labels(things: Things) -> Iterator[str]:
    """The API server refuses another selector."""
    for thing in of_kind(things, "Deployment", "StatefulSet"):
        labels = thing["spec"]["template"]["metadata"]["labels"]
        if not selects(thing["spec"]["selector"]["matchLabels"], labels):
            yield f"{title(thing)}: its selector is not among its pods' labels"


def mounts_are_declared(things: Things) -> Iterator[str]:
    """Each mount has its volume, and each volume a mount."""
    for pod in pods(things):
        declared = {volume["name"] for volume in pod.spec["volumes"]}
        mounted = {mount["name"] for container in pod.containers() for mount in container.thing["volumeMounts"]}
        yield from (f"{pod.name}: no volume {name}" for name in mounted - declared)
        yield from (f"{pod.name}: volume {name} is not mounted" for name in declared - mounted)


def requests_fit_limits(things: Things) -> Iterator[str]:
    """No request is above its limit; memory has a limit, which the files in memory fit in."""
    for pod in pods(things):
        in_memory = [volume.get("emptyDir", {}) for volume in pod.spec["volumes"]]
        shared = sum(quantity(volume["sizeLimit"]) for volume in in_memory if volume.get("medium") == "Memory")
        for container in pod.containers():
            resources = container.thing["resources"]
            for name, asked in resources["requests"].items():
                if quantity(asked) > quantity(resources["limits"].get(name, asked)):
                    yield f"{container.name}: requests more {name} than its limit"
            if "memory" not in resources["limits"]:
                yield f"{container.name}: no limit of memory"
            elif not container.is_init and shared >= quantity(resources["limits"]["memory"]) / 2:
                yield f"{container.name}: files in memory may take half of its memory"


def gpus_are_requested_whole(things: Things) -> Iterator[str]:
    """Request and limit of GPUs are equal, one a rank of the pod, and such pods go where GPUs are."""
    for pod in pods(things):
        for container in pod.containers():
            resources = container.thing["resources"]
            asked, limit = (resources[key].get(GPU) for key in ("requests", "limits"))
            if asked != limit:
                yield f"{container.name}: requests {asked} GPUs, its limit is {limit}"
            if asked is None:
                continue
            ranks = int(container.flag("tensor-parallel", 1))
            nodes = pod.owner["spec"].get("leaderWorkerTemplate", {}).get("size", 1)
            if int(asked) * nodes != ranks:
                yield f"{container.name}: {ranks} ranks on {nodes} times {asked} GPUs"
            if GPU not in [toleration["key"] for toleration in pod.spec.get("tolerations", [])]:
                yield f"{pod.name}: does not tolerate the taint {GPU}"
            if "nvidia.com/gpu.present" not in pod.spec.get("nodeSelector", {}):
                yield f"{pod.name}: may be put on a node without GPUs"


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


def pods_are_restricted(things: Things) -> Iterator[str]:
    """The pod security standard `restricted`, and more; only containers with GPUs have a root that can be written."""
    for pod in pods(things):
        spec, context = pod.spec, pod.spec["securityContext"]
        wanted = {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "fsGroup": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        yield from (f"{pod.name}: {key} is {context.get(key)}" for key in wanted if context.get(key) != wanted[key])
        for key in ("automountServiceAccountToken", "enableServiceLinks"):
            if spec.get(key) is not False:
                yield f"{pod.name}: {key} is not false"
        for container in pod.containers():
            own, resources = container.thing["securityContext"], container.thing["resources"]
            has_gpu = GPU in resources["limits"] or "claims" in resources
            if own.get("allowPrivilegeEscalation") is not False or own.get("capabilities") != {"drop": ["ALL"]}:
                yield f"{container.name}: may gain privileges or capabilities"
            if own.get("readOnlyRootFilesystem") is has_gpu:
                yield f"{container.name}: readOnlyRootFilesystem is {not has_gpu} where it should not"
            if (
                "/tmp" not in [mount["mountPath"] for mount in container.thing["volumeMounts"]]
                and not container.is_init
            ):
                yield f"{container.name}: no /tmp to write to"


def spread_counts_one_revision(things: Things) -> Iterator[str]:
    """Pods of a rollout's two revisions are spread apart from each other, and never stay pending for it."""
    keys = {"Deployment": ["pod-template-hash"], "StatefulSet": ["controller-revision-hash"]}
    for pod in pods(things):
        for spread in pod.spec.get("topologySpreadConstraints", []):
            if spread.get("matchLabelKeys") != keys[pod.owner["kind"]]:
                yield f"{pod.name}: is spread by {spread.get('matchLabelKeys')}"
            if spread["whenUnsatisfiable"] != "ScheduleAnyway":
                yield f"{pod.name}: may stay pending for the sake of its spread"
            if not selects(spread["labelSelector"]["matchLabels"], pod.labels):
                yield f"{pod.name}: its spread counts other pods"


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


def images_are_of_this_version(things: Things) -> Iterator[str]:
    """Tandem's own images, each container of a pod by the tag of the project's version."""
    for pod in pods(things):
        for container in pod.containers():
            name, _, tag = container.thing["image"].rpartition(":")
            if name != f"tandem-{pod.labels['app.kubernetes.io/component']}" or tag != __version__:
                yield f"{container.name}: runs {container.thing['image']}"


RULES = (
    selectors_are_the_templates_labels,
    mounts_are_declared,
    requests_fit_limits,
    gpus_are_requested_whole,
    graces_cover_drains,
    workers_outlast_schedulers,
    probes_ask_the_health_port,
    pods_are_restricted,
    spread_counts_one_revision,
    rollouts_keep_serving,
    images_are_of_this_version,
)
