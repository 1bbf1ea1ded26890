"""What an audit of the dependencies says. The reports are in pip-audit's own form."""

from tests.security.audit import FOUND, NOT_AUDITED, judge

SOUND = {"name": "h11", "version": "0.16.0", "vulns": []}
UNKNOWN = {"name": "torch", "skip_reason": "Dependency not found"}
BROKEN = {"name": "h11", "version": "0.14.0", "vulns": [{"id": "CVE-2025-43859", "fix_versions": ["0.16.0"]}]}


def test_a_vulnerable_package_fails_with_its_remedy() -> None:
    status, lines = judge({"dependencies": [SOUND, BROKEN, UNKNOWN]})
    assert status == FOUND
    assert lines[0] == "h11 0.14.0: CVE-2025-43859, fixed in 0.16.0"


def test_a_package_that_nobody_knows_is_told() -> None:
    assert judge({"dependencies": [SOUND, UNKNOWN]}) == (
        0,
        ["1 packages have no known vulnerability; nothing is known of torch"],
    )


def test_an_index_without_advisories_is_no_success() -> None:
    assert judge({"dependencies": [UNKNOWN]})[0] == NOT_AUDITED
