"""Looks up known vulnerabilities of what is installed: `python -m tests.security.audit PIP_AUDIT [--where-possible]`.

Owns the verdict over what pip-audit found. A package of which nothing is known, because the index that is asked has no
advisories or not that package, is told and is no finding; where that is so of all, nothing was audited, and only
--where-possible takes that for success.
"""

import json
import subprocess
import sys
import sysconfig
from typing import Any

FOUND, NOT_AUDITED = 1, 2


def judge(report: dict[str, Any]) -> tuple[int, list[str]]:
    """Exit status and lines about pip-audit's JSON."""
    packages = report["dependencies"]
    known = [package for package in packages if "skip_reason" not in package]
    lines = [
        f"{package['name']} {package['version']}: {one['id']}, fixed in {', '.join(one['fix_versions']) or 'none yet'}"
        for package in known
        for one in package["vulns"]
    ]
    if lines:
        return FOUND, [*lines, "update these packages, or pin what they need, in pyproject.toml"]
    if not known:
        return NOT_AUDITED, ["nothing was audited: the package index that is asked has no advisories"]
    unknown = [package["name"] for package in packages if "skip_reason" in package]
    not_asked = f"; nothing is known of {', '.join(unknown)}" if unknown else ""
    return 0, [f"{len(known)} packages have no known vulnerability{not_asked}"]


def main(pip_audit: str, *options: str) -> int:
    """Asks and prints."""
    where = sysconfig.get_path("purelib")
    command = [pip_audit, "--skip-editable", "--format", "json", "--progress-spinner", "off", "--path", where]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    try:
        status, lines = judge(json.loads(answer.stdout))
    except json.JSONDecodeError:
        status, lines = NOT_AUDITED, ["nothing was audited: pip-audit could not ask (above)"]
    print("audit:", *lines, sep="\n  ")
    return 0 if status == NOT_AUDITED and "--where-possible" in options else status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
