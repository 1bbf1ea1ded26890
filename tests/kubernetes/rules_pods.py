"""Rules for what runs: what the API server refuses, what a pod may use, and where it goes.

A rule takes all objects of a rendered overlay and gives sentences about what is wrong.
"""

from collections.abc import Iterator

from shared import __version__
from tests.kubernetes.pods import Container, of_kind, pods, quantity, selects, title
from tests.kubernetes.rendered import Things

GPU = "nvidia.com/gpu"
ALLOWED_VOLUMES = (
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"),
    *("image", "persistentVolumeClaim", "projected", "secret"),
)
"""Of the pod security standard."""
PARAMETERS = {"Qwen3-8B": 8.2e9, "Qwen3-14B": 14.8e9, "Qwen3-235B-A22B": 235e9}
"""As the models' cards have it."""
USER = {"runAsNonRoot": True, "runAsUser": 10001, "fsGroup": 10001, "seccompProfile": {"type": "RuntimeDefault"}}
"""That of the images."""


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


def pods_are_restricted(things: Things) -> Iterator[str]:
    """The pod security standard `restricted`, and more; only containers with GPUs have a root that can be written."""
    for pod in pods(things):
        spec, context = pod.spec, pod.spec["securityContext"]
        yield from (f"{pod.name}: {key} is {context.get(key)}" for key in USER if context.get(key) != USER[key])
        for volume in spec["volumes"]:
            if volume.keys().isdisjoint(ALLOWED_VOLUMES):
                yield f"{pod.name}: volume {volume['name']} is of a kind that is not allowed"
        for key in ("automountServiceAccountToken", "enableServiceLinks"):
            if spec.get(key) is not False:
                yield f"{pod.name}: {key} is not false"
        for container in pod.containers():
            yield from _container_problems(container)


def _container_problems(container: Container) -> Iterator[str]:
    own, resources = container.thing["securityContext"], container.thing["resources"]
    has_gpu = GPU in resources["limits"] or "claims" in resources
    if own.get("allowPrivilegeEscalation") is not False or own.get("capabilities") != {"drop": ["ALL"]}:
        yield f"{container.name}: may gain privileges or capabilities"
    if own.get("readOnlyRootFilesystem") is has_gpu:
        yield f"{container.name}: readOnlyRootFilesystem is {has_gpu}"
    if "/tmp" not in [mount["mountPath"] for mount in container.thing["volumeMounts"]] and not container.is_init:
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


def images_are_of_this_version(things: Things) -> Iterator[str]:
    """Tandem's own images, each container of a pod by the tag of the project's version."""
    for pod in pods(things):
        for container in pod.containers():
            name, _, tag = container.thing["image"].rpartition(":")
            if name != f"tandem-{pod.labels['app.kubernetes.io/component']}" or tag != __version__:
                yield f"{container.name}: runs {container.thing['image']}"


def claims_hold_the_model(things: Things) -> Iterator[str]:
    """Its weights in bfloat16 with what lies beside them, and not several times as much."""
    (told,) = (thing["data"] for thing in of_kind(things, "ConfigMap") if "MODEL_NAME" in thing["data"])
    for claim in of_kind(things, "PersistentVolumeClaim"):
        weights, size = 2 * PARAMETERS[told["MODEL_NAME"]], claim["spec"]["resources"]["requests"]["storage"]
        if not 1.1 * weights < quantity(size) < 1.5 * weights:
            yield f"{title(claim)}: asks for {size}, the weights of {told['MODEL_NAME']} are {weights / 1e9:.1f} GB"


RULES = (
    selectors_are_the_templates_labels,
    mounts_are_declared,
    requests_fit_limits,
    gpus_are_requested_whole,
    pods_are_restricted,
    spread_counts_one_revision,
    images_are_of_this_version,
    claims_hold_the_model,
)
