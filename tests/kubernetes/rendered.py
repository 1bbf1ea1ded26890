"""What kustomize makes of deploy/k8s: every overlay, and every component on an overlay that it is for.

Needs the tools of `make manifests`; knows nothing of rules.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import yaml

Thing: TypeAlias = dict[str, Any]
"""One object as YAML has it."""
Things: TypeAlias = list[Thing]

K8S = Path(__file__).parents[2] / "deploy" / "k8s"
TOOLS = Path(f"{sys.prefix}-manifests")
"""The environment that `make manifests` makes, beside the one that runs the tests."""
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
PAIRS = (
    ("cpu-demo", "autoscale-hpa"),
    ("cpu-demo", "autoscale-keda"),
    ("cpu-demo", "inference-gateway"),
    ("cpu-demo", "monitoring"),
    ("cpu-demo", "mtls"),
    ("cpu-demo", "standby"),
    ("cpu-demo", "weights-image"),
    ("gpu-1", "autoscale-hpa"),
    ("gpu-1", "dra"),
    ("gpu-1", "inference-gateway"),
    ("gpu-1", "weights-image"),
    ("gpu-tp8", "mtls"),
    ("lws-multinode", "monitoring"),
    ("lws-multinode", "mtls"),
    ("lws-multinode", "standby"),
    ("standby", "autoscale-keda"),
    ("standby", "monitoring"),
    ("standby", "mtls"),
)
"""Overlays with a component that they don't have."""
NAMES = (*OVERLAYS, *(f"{overlay}+{component}" for overlay, component in PAIRS))


@cache
def kustomize(folder: Path) -> str:
    """The YAML of `kubectl kustomize FOLDER`."""
    command = [TOOLS / "bin" / "kubectl", "kustomize", folder]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def write_kustomization(folder: Path, name: str) -> Path:
    """A folder in which an operator would put an overlay of his own: one of NAMES."""
    overlay, _, component = name.partition("+")
    own = folder / name
    own.mkdir()
    text = f"resources: [{os.path.relpath(K8S / 'overlays' / overlay, own)}]\n"
    if component:
        text += f"components: [{os.path.relpath(K8S / 'components' / component, own)}]\n"
    (own / "kustomization.yaml").write_text(text)
    return own


def objects(text: str) -> Things:
    """All objects of a rendered overlay."""
    return [thing for thing in yaml.safe_load_all(text) if thing]
