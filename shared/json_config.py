"""Reads the JSON files of a model folder and their values. Knows no model."""

import json
from pathlib import Path
from typing import Any

from shared.errors import StartupError


def read_object(folder: Path, name: str, required: bool = False) -> dict[str, Any]:
    """The file's object, empty where the file is absent. Raises StartupError for what is required or not readable."""
    path = folder / name
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise StartupError(f"{folder} is no model folder: {name} is missing") from None
        return {}
    except (OSError, ValueError) as error:
        raise StartupError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise StartupError(f"{path}: not a JSON object")
    return content


def count(config: dict[str, Any], key: str) -> int:
    """Raises KeyError, or ValueError for what is no whole number from 1 on."""
    value = config[key]
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} {value!r} is no whole number from 1 on")
    return value
