"""What images are built and run with: buildah and podman as root, from Debian's packages, in a storage of their own.

Knows nothing of what is in an image.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.patience import PATIENCE_S

PACKAGES = ("aardvark-dns", "buildah", "catatonit", "debian-archive-keyring", "debootstrap", "iptables", "netavark")
PACKAGES += ("podman", "runc")
FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem-images"
"""Base, layers and images stay here, so that the next run is short. It may be removed at any time."""


class WorkshopError(Exception):
    """A step failed; what to do next is in the message."""


def say(what: str) -> None:
    """One line of progress."""
    print(f"images: {what}", flush=True)


def why_not() -> str | None:
    """Why images are not built here; None if they are."""
    if "TORCH" not in os.environ:
        return "make image-check does it: it installs packages, and takes minutes"
    if os.geteuid() != 0:
        return "images are built as root: sudo make image-check"
    if shutil.which("apt-get") is None:
        return "no apt-get: install " + ", ".join(PACKAGES)
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        return "this root may not mount: run it outside of the container, or give that CAP_SYS_ADMIN"
    return None


def install_packages() -> None:
    """Installs what is missing. Raises WorkshopError."""
    known = [subprocess.run(["dpkg-query", "--status", name], capture_output=True).returncode for name in PACKAGES]
    missing = [name for name, status in zip(PACKAGES, known, strict=True) if status]
    if not missing:
        return
    say(f"installing {' '.join(missing)}")
    environment = {"DEBIAN_FRONTEND": "noninteractive"}
    advice = "install them by hand"
    run(["apt-get", "update", "--quiet=2"], advice, environment)
    run(["apt-get", "install", "--quiet=2", "--yes", "--no-install-recommends", *missing], advice, environment)


def run(command: Sequence[str | Path], advice: str, environment: Mapping[str, str] | None = None) -> str:
    """Its standard output; the steps of a build are shown as they come. Raises WorkshopError with what it said last."""
    lines = []
    environment = {**os.environ, **(environment or {})}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        for line in process.stdout or ():
            lines.append(line)
            if "STEP" in line and "RUN" in line:
                say(" ".join(line.split())[:90])
        if process.wait():
            errors.seek(0)
            told = "".join([*lines[-20:], *errors.readlines()[-20:]])
            raise WorkshopError(f"{' '.join(map(str, command))}\nended with {process.returncode}:\n{told}{advice}")
    return "".join(lines).strip()


class Workshop:
    """buildah and podman on a storage in a folder, which nobody else uses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._storage = ["--root", str(folder / "storage"), "--runroot", str(folder / "run")]
        settings = folder / "containers.conf"
        settings.write_text(_settings(folder / "networks"))
        self._environment = {"CONTAINERS_CONF": str(settings)}

    def buildah(self, *arguments: str | Path, advice: str) -> str:
        """Its standard output. Raises WorkshopError."""
        return run(["buildah", *self._storage, *arguments], advice, self._environment)

    def podman(self, *arguments: str | Path, advice: str = "") -> str:
        """Its standard output. Raises WorkshopError."""
        return run(["podman", *self._storage, *arguments], advice, self._environment)

    def has(self, image: str) -> bool:
        """Whether the storage has the image, by repository and tag."""
        return image in self.podman("images", "--format", "{{.Repository}}:{{.Tag}}").splitlines()

    def address(self, container: str) -> str:
        """Of a container in a network of podman's."""
        form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return self.podman("inspect", "--format", form, container)

    def process(self, container: str) -> int:
        """The process id of its first process, out here."""
        return int(self.podman("inspect", "--format", "{{.State.Pid}}", container))

    def ended(self, container: str) -> int:
        """Waits for its end; its exit status."""
        deadline = time.monotonic() + 2 * PATIENCE_S
        while (state := self.podman("inspect", "--format", "{{.State.Status}}", container)) != "exited":
            assert time.monotonic() < deadline, f"{container} is still {state}"
            time.sleep(0.2)
        return int(self.podman("inspect", "--format", "{{.State.ExitCode}}", container))

    def terminate(self, container: str) -> int:
        """SIGTERM to its first process, as a kubelet stops it; its exit status."""
        os.kill(self.process(container), signal.SIGTERM)
        return self.ended(container)

    def clean(self) -> None:
        """Ends all that runs. Images stay."""
        self.podman("pod", "rm", "--all", "--force", "--time", "0")
        self.podman("rm", "--all", "--force", "--time", "0")
        self.podman("volume", "prune", "--force")
        self.podman("network", "prune", "--force")


def _settings(networks: Path) -> str:
    """For a root without systemd who may not raise limits; crun would want one kind of cgroups alone."""
    return f"""[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[network]
network_backend = "netavark"
network_config_dir = "{networks}"
"""
