"""Settings dataclasses: as JSON, for a parent process that hands them to its children, and checks of their values."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from shared.errors import StartupError

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


def check_bounds(settings: Any, names: Iterable[str], least: float, most: float = math.inf) -> None:
    """Raises StartupError, naming flag and bound, for a value of these fields out of range; None is in range."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not least <= value <= most:
            bounds = f"at least {least:g}" if most == math.inf else f"{least:g} to {most:g}"
            raise StartupError(f"{flag(name)} {value}: {bounds} is needed")


def check_distinct(ports: Mapping[str, int | None]) -> None:
    """Raises StartupError, naming both flags, where two give the same port, by flag. None and 0 are no port."""
    flags: dict[int, str] = {}
    for given, port in ports.items():
        if port and (other := flags.setdefault(port, given)) != given:
            raise StartupError(f"{other} and {given} are both {port}: give each a port of its own")


def flag(name: str) -> str:
    """The command line's name of a setting."""
    return "--" + name.replace("_", "-")
