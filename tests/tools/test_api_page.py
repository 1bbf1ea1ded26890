"""docs/api.md: every call and field of the public protocol is there with its number and a comment."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from shared.pb import generation_pb2 as pb

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text()


@pytest.mark.parametrize("name", sorted(pb.DESCRIPTOR.message_types_by_name))
def test_every_field_is_told(name: str) -> None:
    section = PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| .+? \| (\d+) \| (.+) \|$", section, re.MULTILINE)
    message = pb.DESCRIPTOR.message_types_by_name[name]
    assert [(row[0], int(row[1])) for row in rows] == [(field.name, field.number) for field in message.fields]
    assert all(len(row[2]) > 5 for row in rows)


def test_every_call_is_told() -> None:
    for method in pb.DESCRIPTOR.services_by_name["GenerationService"].methods:
        assert f"| `{method.name}` | [{method.input_type.name}](#{method.input_type.name.lower()}) |" in PAGE


def test_the_page_and_the_stubs_are_what_the_protocol_gives() -> None:
    command = [sys.executable, str(ROOT / "protos" / "generate.py"), "--check"]
    assert subprocess.run(command, capture_output=True, text=True).returncode == 0, "run `make protos`"
