"""The order of the files: those that take longest begin first, so that none of them is what all wait for at the end."""

import pytest

LONGEST = (
    "test_soak",
    "test_loss",
    "test_standby",
    "test_program",
    "test_stopped",
    "test_groups",
    "test_net",
    "test_openai",
    "test_constrain",
    "test_nodes",
    "test_security",
    "test_sampling",
    "test_tools",
    "test_resume",
    "test_step_faults",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Stable: what is not named keeps its place."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
