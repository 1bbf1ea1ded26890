"""Every object is one that an API server knows: by Kubernetes' schemas, those of custom resources, checkov's rules."""

import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.kubernetes.pods import Pod, pods
from tests.kubernetes.rendered import TOOLS, Thing, Things, objects

HERE = Path(__file__).parent
VERSIONS = ("1.34", "1.37")
"""Of Kubernetes: the oldest one that has all that is used, and the newest one whose schemas there are."""
PACKAGED = ("cert-manager.io", "gateway.networking.k8s.io", "keda.sh", "monitoring.coreos.com")
EXCEPTIONS = {
    "CKV_K8S_11": "a limit of CPU would throttle, and stall every stream; requests are what is needed",
    "CKV_K8S_15": "tags are never moved: a node that has the image starts without the registry",
    "CKV_K8S_22": "containers with GPUs: NVIDIA's hook writes into the root",
    "CKV_K8S_43": "the digest is known when the image is built, in the operator's registry",
}
"""Checks of checkov that don't hold here, and why."""


@pytest.fixture(scope="module")
def every(texts: dict[str, str]) -> Things:
    """All objects of all overlays, each different one once."""
    different = {json.dumps(thing, sort_keys=True): thing for text in texts.values() for thing in objects(text)}
    return list(different.values())


def group(thing: Thing) -> str:
    """Of its apiVersion."""
    return str(thing["apiVersion"]).rpartition("/")[0]


def is_custom(thing: Thing) -> bool:
    """Whether no Kubernetes has this kind by itself."""
    return group(thing) in (*PACKAGED, *(path.stem for path in (HERE / "schemas").iterdir()))


def problems(*command: str | Path, things: Things) -> list[str]:
    """What a tool says of the objects."""
    result = subprocess.run(command, input=json.dumps(things), check=True, capture_output=True, text=True)
    found: list[str] = json.loads(result.stdout)
    return found


def built_in(things: Things) -> list[str]:
    """By the schemas of Kubernetes."""
    return problems(TOOLS / "bin" / "python", HERE / "tools" / "built_in.py", *VERSIONS, things=things)


def packaged(things: Things) -> list[str]:
    """By the schemas of custom resources that packages have."""
    return problems("node", HERE / "tools" / "custom_resources.mjs", TOOLS / "node_modules", things=things)


def own_schema(thing: Thing) -> None:
    """By a schema of this folder. Raises ValidationError."""
    schema = json.loads((HERE / "schemas" / f"{group(thing)}.json").read_text(encoding="utf-8"))
    jsonschema.validate(thing, schema)


def as_pod(pod: Pod) -> Thing:
    """What its controller would make, whose own schema does not look into it."""
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "any"}, "spec": pod.spec}


def test_kubernetes_knows_every_object(every: Things) -> None:
    own = [thing for thing in every if not is_custom(thing)]
    assert built_in([*own, *map(as_pod, pods(every))]) == []


def test_custom_resources_fit_their_schemas(every: Things) -> None:
    assert packaged([thing for thing in every if group(thing) in PACKAGED]) == []
    rest = [thing for thing in every if is_custom(thing) and group(thing) not in PACKAGED]
    assert rest
    for thing in rest:
        own_schema(thing)


def test_the_schemas_refuse(every: Things) -> None:
    unknown: Thing = {"apiVersion": "apps/v7", "kind": "Deployment", "metadata": {"name": "x"}}
    misspelt: Any = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"prots": []}}
    assert len(built_in([unknown, misspelt])) == 2 * len(VERSIONS), "a kind that is not known counts"
    custom = [json.loads(json.dumps(thing)) for thing in every if is_custom(thing)]
    (scaled,) = [thing for thing in custom if thing["kind"] == "ScaledObject"][:1]
    scaled["spec"]["maxReplicas"] = 3
    assert packaged([scaled]) == ["ScaledObject tandem-worker: no such field: /spec/maxReplicas"]
    monitor = next(thing for thing in custom if thing["kind"] == "PodMonitor")
    monitor["spec"]["podMetricsEndpoints"][0]["port"] = 9100
    assert packaged([monitor]) == ["PodMonitor tandem-scheduler: data/spec/podMetricsEndpoints/0/port must be string"]
    leader = next(thing for thing in custom if thing["kind"] == "LeaderWorkerSet")
    leader["spec"]["startPolicy"] = "LeaderCreated"
    with pytest.raises(jsonschema.ValidationError):
        own_schema(leader)


def test_checkov_finds_the_exceptions_alone(texts: dict[str, str], tmp_path: Path) -> None:
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    command = [TOOLS / "bin" / "checkov", "--directory", tmp_path, "--framework", "kubernetes", "--skip-download"]
    output = subprocess.run([*command, "--output", "json", "--quiet"], capture_output=True, text=True).stdout
    report = json.loads(output)
    assert report["summary"]["parsing_errors"] == 0 and report["summary"]["passed"] > 1000
    failed = {
        check["check_id"]: f"{check['check_name']}: {check['resource']}" for check in report["results"]["failed_checks"]
    }
    assert {key: failed[key] for key in failed.keys() - EXCEPTIONS.keys()} == {}
    assert failed.keys() == EXCEPTIONS.keys(), "an exception that nothing needs"
