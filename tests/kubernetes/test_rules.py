"""Each rule sees what it is there for: a rendered overlay is broken in one place, and the rule says so."""

import pytest

from tests.kubernetes import damages_lifecycle, damages_pods, damages_reach, damages_told
from tests.kubernetes.damage import Damage
from tests.kubernetes.pods import of_kind
from tests.kubernetes.rendered import objects
from tests.kubernetes.rules_network import policies_admit_what_is_needed_alone
from tests.kubernetes.test_overlays import RULES, Rule

DAMAGES = (*damages_pods.DAMAGES, *damages_lifecycle.DAMAGES, *damages_reach.DAMAGES, *damages_told.DAMAGES)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: f"{damage.rule}: {damage.text}")
def test_a_rule_sees_the_damage(damage: Damage, texts: dict[str, str]) -> None:
    things = objects(texts[damage.overlay])
    damage.change(things)
    assert any(damage.text in problem for problem in rule_of(damage)(things))


def rule_of(damage: Damage) -> Rule:
    """By its name."""
    return next(rule for rule in RULES if rule.__name__ == damage.rule)


def test_every_rule_is_tried() -> None:
    assert {damage.rule for damage in DAMAGES} == {rule.__name__ for rule in RULES}


def test_a_policy_without_rules_shuts_and_none_at_all_opens(texts: dict[str, str]) -> None:
    """As Kubernetes has it: who is selected by no policy may do all."""
    things = objects(texts["cpu-demo"])
    open_to_all = [thing for thing in things if thing not in of_kind(things, "NetworkPolicy")]
    assert "a stranger reaches Deployment tandem-scheduler at TCP 1" in [
        *policies_admit_what_is_needed_alone(open_to_all)
    ]
