"""Rendered overlays for tests, or the reason why there are none."""

from pathlib import Path

import pytest

from tests.kubernetes.rendered import K8S, NAMES, OVERLAYS, TOOLS, kustomize, write_kustomization


@pytest.fixture(scope="session", autouse=True)
def tools() -> Path:
    """The environment of `make manifests`."""
    if not (TOOLS / ".runs").exists():
        pytest.skip(f"no {TOOLS}: make manifests, which needs npm")
    return TOOLS


@pytest.fixture(scope="session")
def texts(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The YAML of all overlays, and of all pairs of overlay and component, by name."""
    folder = tmp_path_factory.mktemp("overlays")
    own = {name: K8S / "overlays" / name if name in OVERLAYS else write_kustomization(folder, name) for name in NAMES}
    return {name: kustomize(path) for name, path in own.items()}
