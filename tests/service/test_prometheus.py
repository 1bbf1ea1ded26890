"""Dashboard and alert rules against a real Prometheus that scrapes a real run, configured as deploy/ has it."""

import asyncio
import json
import math
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.ports import find_free
from tests.patience import PATIENCE_S
from tests.service.tandem_process import Tandem, free_pair, generate_all, running
from tests.service.test_metrics import documented, requests

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "tandem.rules.yml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "tandem.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
WINDOW = "20s"

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Prometheus is not installed: apt-get install prometheus"
)
Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Asks a Prometheus that has seen a few seconds of load."""
    folder, port = tmp_path_factory.mktemp("prometheus"), free_pair()
    with running(folder / "log", "--kv-cache-memory", "64", "--metrics-port", str(port)) as service:
        config = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
        assert ":9100" in config and ":9101" in config
        config = config.replace(":9100", f":{port}").replace(":9101", f":{port + 1}")
        shutil.copy(RULES, folder)
        (folder / "prometheus.yml").write_text(re.sub(r"_interval: \w+", "_interval: 500ms", config))
        own = find_free("127.0.0.1")
        flags = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        flags += [f"--web.listen-address=127.0.0.1:{own}", "--log.level=error"]
        with subprocess.Popen(["prometheus", *flags]) as process:
            try:
                load_until_scraped(service, own)
                yield lambda path, **values: query(own, path, **values)
            finally:
                process.terminate()


def load_until_scraped(service: Tandem, port: int) -> None:
    """Requests, until the metrics have been seen to rise by both jobs."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        asyncio.run(generate_all(service.endpoint, requests(4)))
        seen = {"tandem_requests_total", "tandem_worker_tokens_total"}
        try:
            if all(values(query(port, "query", query=f"sum(rate({name}[{WINDOW}])) > 0")) for name in seen):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("Prometheus saw no load")


def query(port: int, path: str, **parameters: str) -> Any:
    """The data of an answer that succeeded."""
    url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        told = json.load(answer)
    assert told["status"] == "success"
    return told["data"]


def values(data: Any) -> list[float]:
    return [float(series["value"][1]) for series in data["result"]]


@needs_prometheus
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_panel_shows_something(ask: Ask, expression: str) -> None:
    found = values(ask("query", query=expression.replace("$__rate_interval", WINDOW)))
    assert found and all(math.isfinite(value) and value >= -1e-9 for value in found), found


@needs_prometheus
def test_the_rules_are_sound_and_silent_while_all_is_well(ask: Ask) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while "unknown" in {rule["health"] for rule in ask("rules")["groups"][0]["rules"]}:
        assert time.monotonic() < deadline, "the rules were never evaluated"
        time.sleep(0.1)
    for rule in ask("rules")["groups"][0]["rules"]:
        assert (rule["health"], rule["state"]) == ("ok", "inactive"), rule


RETRYING = """
rule_files: [{rules}]
evaluation_interval: 15s
tests:
  - interval: 15s
    input_series:
      - {{series: "tandem_build_info", values: "1x100"}}
      - {{series: "tandem_leading{{instance='s'}}", values: "1x100"}}
      - {{series: "tandem_group_connected{{instance='s', worker='w'}}", values: "1x8 0x90"}}
      - {{series: "tandem_requests_total{{instance='s', finished_reason='stop'}}", values: "100x100"}}
      - {{series: "tandem_requests_total{{instance='s', finished_reason='unavailable'}}", values: "0x12 5x86"}}
    alert_rule_test:
      - {{eval_time: 20m, alertname: TandemErrors, exp_alerts: []}}
      - eval_time: 20m
        alertname: TandemNoWorker
        exp_alerts:
          - exp_labels: {{instance: s, severity: critical}}
            exp_annotations: {{summary: "{summary}"}}
"""
"""The worker is gone after two minutes; five requests end UNAVAILABLE a minute later, and their clients only retry."""


@needs_prometheus
def test_who_is_without_a_worker_is_told_so_for_as_long_as_clients_only_retry(tmp_path: Path) -> None:
    summary = "s has no worker: requests wait, and end UNAVAILABLE after --worker-loss-timeout."
    (tmp_path / "test.yml").write_text(RETRYING.format(rules=RULES, summary=summary))
    subprocess.run(["promtool", "test", "rules", str(tmp_path / "test.yml")], check=True, stdout=subprocess.DEVNULL)


@needs_prometheus
def test_promtool_finds_nothing() -> None:
    subprocess.run(["promtool", "check", "rules", str(RULES)], check=True, stdout=subprocess.DEVNULL)
    config = DEPLOY / "prometheus" / "prometheus.yml"
    subprocess.run(["promtool", "check", "config", str(config)], check=True, stdout=subprocess.DEVNULL)


def test_dashboard_and_rules_name_only_what_there_is() -> None:
    names = set(documented())
    parts = {name + part for name in names for part in ("_bucket", "_sum", "_count")}
    named = set(re.findall(r"\btandem_\w+", RULES.read_text() + " ".join(EXPRESSIONS)))
    assert named and named <= names | parts
