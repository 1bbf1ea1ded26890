"""Every overlay, and every component on an overlay, keeps every rule."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from shared import __version__
from tests.kubernetes import (
    rules_lifecycle,
    rules_network,
    rules_pods,
    rules_programs,
    rules_references,
    rules_services,
)
from tests.kubernetes.pods import Pod, of_component, of_kind
from tests.kubernetes.rendered import K8S, NAMES, OVERLAYS, PAIRS, Things, kustomize, objects
from tests.kubernetes.rules_pods import GPU

RULES = (
    *rules_pods.RULES,
    *rules_lifecycle.RULES,
    *rules_services.RULES,
    *rules_references.RULES,
    *rules_programs.RULES,
    *rules_network.RULES,
)
PAGE = (K8S.parents[1] / "docs" / "kubernetes.md").read_text(encoding="utf-8")
Rule = Callable[[Things], Iterator[str]]


@pytest.mark.parametrize("name", NAMES)
def test_an_overlay_keeps_all_rules(name: str, texts: dict[str, str]) -> None:
    things = objects(texts[name])
    assert [f"{rule.__name__}: {problem}" for rule in RULES for problem in rule(things)] == []


@pytest.mark.parametrize("index", range(2))
def test_an_overlay_of_the_page_keeps_all_rules(index: int, tools: Path, tmp_path: Path) -> None:
    shutil.copytree(K8S.parent, tmp_path / "deploy")
    own = tmp_path / "deploy" / "my"
    own.mkdir()
    (own / "kustomization.yaml").write_text(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[index])
    things = objects(kustomize(own))
    for container in of_component(things, "worker").containers():
        container.thing["image"] = container.thing["image"].removeprefix("registry.example.com/")
    scheduler = of_component(things, "scheduler").main.thing
    scheduler["image"] = scheduler["image"].removeprefix("registry.example.com/")
    assert [problem for rule in RULES for problem in rule(things)] == []


@pytest.mark.parametrize("name", OVERLAYS)
def test_sizes_of_the_page_are_those_of_the_files(name: str, texts: dict[str, str]) -> None:
    scheduler, worker = (of_component(objects(texts[name]), component) for component in ("scheduler", "worker"))
    number = scheduler.owner["spec"]["replicas"]
    replicas = str(worker.owner["spec"]["replicas"])
    if nodes := worker.owner["spec"].get("leaderWorkerTemplate", {}).get("size"):
        replicas += f" group of {nodes} pods"
    assert f"| `{name}` | {number}: {_asks(scheduler)} | {replicas}: {_asks(worker)} |" in PAGE


def _asks(pod: Pod) -> str:
    asked = pod.main.thing["resources"]["requests"]
    gpus = f", {asked[GPU]} GPU" if GPU in asked else ""
    return f"{asked['cpu']} CPU, {asked['memory']}{gpus}"


def test_every_component_is_rendered() -> None:
    own = [component for name in OVERLAYS for component in _components(name)]
    assert {path.name for path in (K8S / "components").iterdir()} == {*own, *(component for _, component in PAIRS)}


def _components(overlay: str) -> list[str]:
    text = (K8S / "overlays" / overlay / "kustomization.yaml").read_text(encoding="utf-8")
    return [Path(path).name for path in yaml.safe_load(text).get("components", [])]


@pytest.mark.parametrize("name", ["cpu-demo", "gpu-1", "gpu-tp8", "standby"])
def test_what_has_no_component_of_a_custom_kind_applies_to_a_bare_cluster(name: str, texts: dict[str, str]) -> None:
    builtin = re.compile(r"v1|(apps|policy|networking\.k8s\.io|scheduling\.k8s\.io)/v1")
    assert all(builtin.fullmatch(thing["apiVersion"]) for thing in objects(texts[name]))


def test_versions_in_the_files_are_the_projects() -> None:
    files = [path for path in K8S.rglob("kustomization.yaml") if "newTag" in path.read_text(encoding="utf-8")]
    assert files
    for path in files:
        assert set(re.findall(r"newTag: ([^\s}]+)", path.read_text(encoding="utf-8"))) == {__version__}, path


def test_there_are_two_schedulers_where_one_stands_by(texts: dict[str, str]) -> None:
    scheduler = of_component(objects(texts["standby"]), "scheduler")
    assert scheduler.owner["spec"]["replicas"] == 2 and scheduler.main.flag("drain") == "handoff"


def test_alerts_are_those_of_prometheus(texts: dict[str, str]) -> None:
    (rules,) = of_kind(objects(texts["cpu-demo+monitoring"]), "PrometheusRule")
    page = K8S.parent / "prometheus" / "tandem.rules.yml"
    assert rules["spec"] == yaml.safe_load(page.read_text(encoding="utf-8"))


def test_both_autoscalers_scale_alike(texts: dict[str, str]) -> None:
    (hpa,) = of_kind(objects(texts["cpu-demo+autoscale-hpa"]), "HorizontalPodAutoscaler")
    (keda,) = of_kind(objects(texts["cpu-demo+autoscale-keda"]), "ScaledObject")
    metrics = [metric["external"] for metric in hpa["spec"]["metrics"]]
    triggers = [trigger["metadata"] for trigger in keda["spec"]["triggers"]]
    assert [metric["target"]["averageValue"] for metric in metrics] == [trigger["threshold"] for trigger in triggers]
    names = [metric["metric"]["name"] for metric in metrics]
    assert names == [re.findall(r"tandem_\w+", trigger["query"])[0] for trigger in triggers]
    assert hpa["spec"]["behavior"] == keda["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
