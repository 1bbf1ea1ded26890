"""Every overlay, and every component on an overlay, keeps every rule."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from shared import __version__
from tests.kubernetes import rules_network, rules_pods, rules_programs, rules_services
from tests.kubernetes.pods import of_component, of_kind
from tests.kubernetes.rendered import K8S, NAMES, OVERLAYS, PAIRS, Things, objects

RULES = (*rules_pods.RULES, *rules_services.RULES, *rules_programs.RULES, *rules_network.RULES)
Rule = Callable[[Things], Iterator[str]]


@pytest.mark.parametrize("name", NAMES)
def test_an_overlay_keeps_all_rules(name: str, texts: dict[str, str]) -> None:
    things = objects(texts[name])
    assert [f"{rule.__name__}: {problem}" for rule in RULES for problem in rule(things)] == []


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
