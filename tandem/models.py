"""Names of models: a folder, or one of the two trained ones in the package."""

from pathlib import Path

from shared.errors import StartupError

_TINY = Path(__file__).parent / "tiny"
BUILT_IN = {"tiny": _TINY / "dense", "tiny-moe": _TINY / "moe"}


def model_folder(name: str) -> Path:
    """The folder of a model. Raises StartupError where there is none."""
    folder = BUILT_IN.get(name, Path(name))
    if not (folder / "config.json").is_file():
        raise StartupError(f"no model at {name!r}: give a folder with config.json, or one of {', '.join(BUILT_IN)}")
    return folder
