"""What the images hold is pinned (deploy/docker), and each pin is a version that the project allows."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[2]


@pytest.mark.parametrize(("image", "extra"), [("scheduler", "otel"), ("worker", "worker")])
def test_pins_are_what_the_project_allows(image: str, extra: str) -> None:
    text = (PROJECT / "deploy" / "docker" / f"{image}.txt").read_text()
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    for line in project["dependencies"] + project["optional-dependencies"][extra]:
        needed = Requirement(line)
        assert needed.specifier.contains(pins[canonicalize_name(needed.name)]), f"{line}: make lock"
