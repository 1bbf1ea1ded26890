"""What is in the images, and how their first process behaves: without rights, with nothing to write to but /tmp."""

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared import __version__
from shared.rpc import until_serving
from tests.images.build import DOCKER, SCHEDULER, WORKER
from tests.images.workshop import Workshop
from tests.patience import PATIENCE_S

RESTRICTED = ["--read-only", "--read-only-tmpfs=false", "--tmpfs=/tmp:mode=1777", "--cap-drop=all"]
RESTRICTED += ["--security-opt=no-new-privileges"]
PROGRAMS = {
    SCHEDULER: ["scheduler", "--model=tiny", "--host=0.0.0.0", "--port=50051", "--workers=127.0.0.1:50052"],
    WORKER: ["worker", "--model=tiny", "--host=0.0.0.0", "--port=50052", "--kv-cache-memory=64"],
}
SERVES = {SCHEDULER: (50051, "liveness"), WORKER: (50052, "readiness")}
"""Port and health service of one that runs alone."""
PACKAGES = "from importlib.metadata import distributions as d; print(*(f'{p.name}=={p.version}' for p in d()))"

both = pytest.mark.parametrize("image", PROGRAMS, ids=["scheduler", "worker"])


@contextlib.contextmanager
def running(shop: Workshop, image: str) -> Iterator[str]:
    """A container of the image's program, begun a moment ago."""
    container = shop.podman("run", "--detach", *RESTRICTED, image, *PROGRAMS[image])
    try:
        yield container
    finally:
        shop.podman("rm", "--force", "--time", "0", container)


def wait_serving(shop: Workshop, container: str, image: str) -> None:
    port, service = SERVES[image]
    endpoint = f"{shop.address(container)}:{port}"
    asyncio.run(asyncio.wait_for(until_serving(endpoint, service), PATIENCE_S))


def shell(shop: Workshop, image: str, command: str) -> str:
    """What a command prints that runs in the image as root."""
    flags = ["--rm", "--network=none", "--user=0", "--entrypoint=sh"]
    return shop.podman("run", *flags, image, "-c", command)


def packages(shop: Workshop, image: str) -> dict[str, str]:
    """Name to version of what is installed."""
    return pinned(shell(shop, image, f'python3 -c "{PACKAGES}"').replace(" ", "\n"))


def pinned(text: str) -> dict[str, str]:
    """Name to version, of lines name==version; a build of that version counts as it."""
    found = re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in found}


def test_the_linter_has_nothing_to_say() -> None:
    hadolint = Path(f"{sys.prefix}-images") / "bin" / "hadolint"
    if not hadolint.exists():
        pytest.skip("no hadolint: make image-check")
    subprocess.run([hadolint, DOCKER / "Dockerfile"], check=True)


def test_the_scheduler_has_exactly_what_is_pinned_and_no_torch(images: Workshop) -> None:
    found = packages(images, SCHEDULER)
    assert found == {**pinned((DOCKER / "scheduler.txt").read_text()), "tandem-serve": __version__}
    assert not {"torch", "triton"} & found.keys()


def test_the_worker_has_torch_and_nothing_that_is_not_pinned(images: Workshop) -> None:
    found = packages(images, WORKER)
    assert "torch" in found
    pins = pinned((DOCKER / "scheduler.txt").read_text()) | pinned((DOCKER / "worker.txt").read_text())
    assert found.items() <= {**pins, "tandem-serve": __version__}.items()


@both
def test_who_it_is(images: Workshop, image: str) -> None:
    config = json.loads(images.podman("image", "inspect", image))[0]["Config"]
    assert config["User"] == "10001:10001"  # a number: runAsNonRoot can't judge names
    assert config["Labels"]["org.opencontainers.image.version"] == __version__
    assert config["Entrypoint"] == ["tini", "--", "tandem"]


@both
def test_nothing_lets_a_user_become_another_one_or_builds(images: Workshop, image: str) -> None:
    assert shell(images, image, "find / -xdev -type f -perm /6000") == ""
    assert (
        shell(images, image, "command -v gcc; command -v pip; command -v pip3; ls -A /opt /mnt")
        == "/mnt:\n\n/opt:\ntandem"
    )


@both
def test_it_serves_without_rights_and_drains(images: Workshop, image: str) -> None:
    with running(images, image) as container:
        wait_serving(images, container, image)
        assert images.terminate(container) == 0


@both
def test_it_can_be_stopped_before_it_is_up(images: Workshop, image: str) -> None:
    with running(images, image) as container:
        assert images.terminate(container) in (0, 128 + 15)


def test_orphans_are_buried(images: Workshop) -> None:
    with running(images, SCHEDULER) as container:
        orphan = "import subprocess; print(subprocess.Popen(['sleep', '0.1']).pid)"
        pid = images.podman("exec", container, "python3", "-c", orphan)
        deadline = time.monotonic() + PATIENCE_S
        while pid in images.podman("exec", container, "ls", "/proc").split():
            assert time.monotonic() < deadline, f"process {pid} is a zombie"
