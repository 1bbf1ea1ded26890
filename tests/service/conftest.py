"""The order of the files: those that take longest begin first, so that none of them is what all wait for at the end."""

import pytest

LONGEST = (
    "test_soak",
    "test_net",
    "test_loss",
    "test_standby",
    "test_nodes",
    "test_groups",
    "test_step_faults",
    "test_resume",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Stable: what is not named keeps its place."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
