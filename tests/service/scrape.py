"""A scrape as Prometheus sees it: families and samples of a metrics endpoint, and waiting for them."""

import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from tests.patience import PATIENCE_S


@dataclass(frozen=True)
class Scrape:
    """One answer of an endpoint."""

    kinds: dict[str, str]
    """By family name, as its `# TYPE` line has it."""
    texts: dict[str, str]
    labels: dict[str, frozenset[str]]
    """Label names of each family, without `le`."""
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float]

    def value(self, name: str, **labels: str) -> float:
        """The sum over the samples that have at least these labels."""
        wanted = set(labels.items())
        return sum(value for (sample, own), value in self.samples.items() if sample == name and wanted <= own)


def scrape(port: int) -> Scrape:
    """Asks once."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    names = {family.name: family.name + "_total" * (family.type == "counter") for family in families}
    return Scrape(
        kinds={names[family.name]: family.type for family in families},
        texts={names[family.name]: family.documentation for family in families},
        labels={
            names[family.name]: frozenset(label for sample in family.samples for label in sample.labels) - {"le"}
            for family in families
        },
        samples={
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        },
    )


def scrape_until(port: int, condition: Callable[[Scrape], bool], within: float = PATIENCE_S) -> Scrape:
    """Asks until the answer is as it should be: snapshots come twice a second."""
    deadline = time.monotonic() + within
    while not condition(answer := scrape(port)):
        assert time.monotonic() < deadline, "the metrics never came to what was waited for"
        time.sleep(0.1)
    return answer
