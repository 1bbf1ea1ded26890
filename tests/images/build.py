"""Builds both images by buildah on a local base: a Debian that debootstrap makes. Knows nothing of running them."""

import hashlib
import os
import shutil
import sys
from pathlib import Path

from shared import __version__
from tests.images.workshop import Workshop, run, say

PROJECT = Path(__file__).parents[2]
DOCKER = PROJECT / "deploy" / "docker"
SUITE, PYTHON = "bookworm", "3.11"
BASE = f"localhost/debian:{SUITE}"
SCHEDULER, WORKER = (f"localhost/tandem-{target}:{__version__}" for target in ("scheduler", "worker"))
TORCH = os.environ.get("TORCH", "")
"""As pip writes it. Which build that is depends on where pip looks; the check wants one for CPUs, and takes any."""
_WHEELS = "/mnt"
"""Where a build sees the wheels: a folder that every base has, so that no image has one more."""


def make_base(workshop: Workshop) -> None:
    """The local base, unless it is there. Raises WorkshopError."""
    if workshop.has(BASE):
        return
    say(f"making a base of Debian {SUITE}: a minute or more")
    root, packed = workshop.folder / "root", workshop.folder / "root.tar"
    shutil.rmtree(root, ignore_errors=True)
    command = ["debootstrap", "--variant=minbase", SUITE, root]
    run(command, f"look into {root}/debootstrap/debootstrap.log; it needs Debian's mirror")
    left = ["--exclude=./var/cache/apt/*", "--exclude=./var/lib/apt/lists/*"]
    run(["tar", "--create", "--file", packed, "--directory", root, *left, "."], "is the disk full? df -h")
    workshop.podman("import", packed, BASE, advice="is the disk full? df -h")
    shutil.rmtree(root)
    packed.unlink()


def build(workshop: Workshop, target: str, image: str, **arguments: str) -> None:
    """Builds one target of the Dockerfile. Raises WorkshopError.

    pip looks here, in its own way, and the build sees what it found: so no image is told where packages come from.
    """
    wheels = _download(workshop.folder)
    settings = workshop.folder / "pip.conf"
    settings.write_text(f"[global]\nno-index = true\nfind-links = {_WHEELS}\n")
    say(f"building {image}")
    flags = ["build", "--layers", "--isolation", "chroot", "--pull-never", "--file", DOCKER / "Dockerfile"]
    for name, value in {"BASE": BASE, "VERSION": __version__, **arguments}.items():
        flags += ["--build-arg", f"{name}={value}"]
    flags += ["--secret", f"id=pip.conf,src={settings}", "--volume", f"{wheels}:{_WHEELS}:ro"]
    advice = "the last STEP failed"
    workshop.buildah(*flags, "--target", target, "--tag", image, PROJECT, advice=advice)


def _download(folder: Path) -> Path:
    """The folder with the wheels of both images. Raises WorkshopError."""
    scheduler, worker = DOCKER / "scheduler.txt", DOCKER / "worker.txt"
    key = hashlib.sha256(scheduler.read_bytes() + worker.read_bytes() + TORCH.encode()).hexdigest()[:16]
    wheels = folder / f"wheels-{key}"
    if wheels.exists():
        return wheels
    say("downloading the wheels of both images: a minute or more")
    for old in folder.glob("wheels-*"):
        shutil.rmtree(old)
    partial = folder / "partial"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--dest", partial]
    pip += ["--only-binary=:all:", "--python-version", PYTHON]
    advice = "where pip looks is what `pip config list` says"
    run([*pip, "--no-deps", "--requirement", scheduler], advice)
    run([*pip, "--constraint", worker, "setuptools", "safetensors", TORCH], advice)
    return partial.rename(wheels)
