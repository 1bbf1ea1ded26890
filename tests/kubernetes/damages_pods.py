"""Damage to what runs, which the rules of rules_pods see."""

from tests.kubernetes.damage import Damage, container, flag, pod, spec

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
        "not allowed",
        lambda things: pod(things)["volumes"].append({"name": "host", "hostPath": {"path": "/"}}),
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
        "images_are_of_this_version",
        "runs tandem-worker:latest",
        lambda things: container(things).update(image="tandem-worker:latest"),
    ),
    Damage(
        "claims_hold_the_model",
        "asks for 600Gi, the weights of Qwen3-8B are 16.4 GB",
        lambda things: spec(things, "PersistentVolumeClaim", "tandem-model")["resources"]["requests"].update(
            storage="600Gi"
        ),
        "gpu-1",
    ),
    Damage(
        "claims_hold_the_model",
        "the weights of Qwen3-235B-A22B are 470.0 GB",
        lambda things: spec(things, "PersistentVolumeClaim", "tandem-model")["resources"]["requests"].update(
            storage="440Gi"
        ),
        "lws-multinode",
    ),
)
