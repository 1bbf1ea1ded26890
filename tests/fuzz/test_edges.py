"""Whatever comes in at an edge of a process, the process refuses it by a named kind, or takes it, and goes on.

`python -m tests.fuzz` looks longer, led by what code is reached.
"""

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.edges import EDGES, edge


@pytest.mark.parametrize("name", EDGES)
def test_an_edge_takes_or_refuses_whatever_comes(name: str) -> None:
    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(edge(name).inputs)
    def holds(value: object) -> None:
        edge(name).take(value)

    holds()
