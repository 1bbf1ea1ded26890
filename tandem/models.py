"""Names of models: a folder, or a trained one in the package."""

from pathlib import Path

from shared.errors import StartupError
from tandem import tiny

BUILT_IN = {folder.name: folder for folder in (tiny.DENSE, tiny.MOE)}


def model_folder(name: str) -> Path:
    """The folder of a model. Raises StartupError where there is none."""
    folder = BUILT_IN.get(name, Path(name))
    if not (folder / "config.json").is_file():
        raise StartupError(f"no model at {name!r}: give a folder with config.json, or {', '.join(BUILT_IN)}")
    return folder
