"""A namespace that stands for a pod: an address on a switch, and names as a cluster's DNS would tell them."""

import os
import subprocess
import time
from pathlib import Path

from tests.net.switch import Switch, run_in
from tests.patience import PATIENCE_S
from tests.service.pod import Pod


class Names:
    """The records of all names, for every host at once. A name has as many addresses as there are pods behind it."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "hosts"
        self._records: dict[str, list[str]] = {}
        self.tell()

    def tell(self, **records: list[str]) -> None:
        """These names have these addresses from now on."""
        self._records |= records
        lines = [f"{address} {name}\n" for name, addresses in self._records.items() for address in addresses]
        self.file.write_text("".join(["127.0.0.1 localhost\n", *lines]))


class Host:
    """One such namespace."""

    def __init__(self, switch: Switch, address: str, names: Names) -> None:
        self.address = address
        empty = names.file.with_name("resolv.conf")
        empty.touch()
        mounts = f"mount --bind {names.file} /etc/hosts; mount --bind {empty} /etc/resolv.conf"
        self._holder = subprocess.Popen(["unshare", "--net", "--mount", "sh", "-ec", f"{mounts}; exec sleep infinity"])
        self._until_apart()
        run_in(self._holder.pid, "ip", "link", "set", "lo", "up")
        self.link = switch.add(self._holder.pid, address)

    @property
    def words(self) -> list[str]:
        """Of a command line, before the program that shall run here."""
        spaces = ["--net", "--mount", f"--wd={os.getcwd()}"]
        return ["nsenter", "--target", str(self._holder.pid), *spaces]

    def run(self, log: Path, *arguments: str) -> Pod:
        """`tandem ARGUMENTS...`, started again when it ends."""
        return Pod(log, *arguments, before=self.words)

    def close(self) -> None:
        """What runs here has been stopped."""
        self._holder.kill()
        self._holder.wait()

    def _until_apart(self) -> None:
        """`sleep` runs when all is mounted."""
        deadline = time.monotonic() + PATIENCE_S
        while Path(f"/proc/{self._holder.pid}/comm").read_text().strip() != "sleep":
            assert self._holder.poll() is None and time.monotonic() < deadline, "no namespace"
            time.sleep(0.01)
