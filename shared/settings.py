"""Settings dataclasses as JSON: how a parent process hands its configuration to its children."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")


def to_json(settings: Any) -> str:
    """A dataclass of numbers, strings, paths and tuples of them, as one JSON object."""
    return json.dumps(asdict(settings), default=str)


def from_json(kind: type[T], text: str) -> T:
    """The inverse of to_json: JSON knows neither paths nor tuples, the fields' types do."""
    values = json.loads(text)
    hints = get_type_hints(kind)
    for field in fields(kind):  # type: ignore[arg-type]
        value = values[field.name]
        if isinstance(value, list):
            values[field.name] = tuple(value)
        elif value is not None and hints[field.name] in (Path, Path | None):
            values[field.name] = Path(value)
    return kind(**values)
