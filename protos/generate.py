"""Generates shared/pb and docs/api.md from the .proto files beside this script: `make protos`.

Both are checked in; `--check` generates them elsewhere and fails on a difference.
"""

import filecmp
import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from api_page import api_page
from grpc_tools import protoc

HERE = Path(__file__).parent
STUBS = HERE.parent / "shared" / "pb"
PAGE = HERE.parent / "docs" / "api.md"
PLUGINS = ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
"""Beside this interpreter: its environment need not be on PATH."""


def generate(target: Path, page: Path) -> None:
    """Writes the stubs into the folder `target`, without the package path of the protos, and docs/api.md to `page`.

    protoc would import siblings as `tandem.v1`, which is the client library's name.
    """
    protos = sorted(str(path.relative_to(HERE)) for path in HERE.glob("tandem/v1/*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        arguments = ["protoc", f"-I{HERE}", f"-I{files('grpc_tools') / '_proto'}"]
        arguments += [f"--plugin={name}={Path(sys.executable).parent / name}" for name in PLUGINS]
        arguments += [f"--{kind}_out={scratch}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
        descriptors = Path(scratch) / "descriptors"
        arguments += ["--include_source_info", f"--descriptor_set_out={descriptors}"]
        if protoc.main(arguments + protos) != 0:
            raise SystemExit("protoc failed: see its message above")
        page.write_text(api_page(descriptors))
        for path in sorted(Path(scratch).glob("tandem/v1/*.py*")):
            if path.name.startswith("core_pb2_grpc"):
                continue  # core.proto has no service
            text = path.read_text()
            text = re.sub(r"from tandem\.v1 import", "from shared.pb import", text)
            text = re.sub(r"\btandem\.v1\.(\w+_pb2)", r"shared.pb.\1", text)
            text = re.sub(r"import tandem\.v1\.", "import shared.pb.", text)
            (target / path.name).write_text(text)
    (target / "__init__.py").write_text('"""Generated from protos/ by protos/generate.py; do not edit."""\n')


def check() -> None:
    """Fails if what is checked in is not what the protos give."""
    with tempfile.TemporaryDirectory() as scratch, tempfile.NamedTemporaryFile() as page:
        generate(Path(scratch), Path(page.name))
        if not filecmp.cmp(page.name, PAGE, shallow=False):
            raise SystemExit("docs/api.md is out of date: run `make protos` and commit")
        names = {path.name for folder in (Path(scratch), STUBS) for path in folder.glob("*.py*")}
        _, different, missing = filecmp.cmpfiles(scratch, STUBS, names, shallow=False)
    if different or missing:
        raise SystemExit(f"shared/pb is out of date ({', '.join(different + missing)}): run `make protos` and commit")


if __name__ == "__main__":
    check() if "--check" in sys.argv else generate(STUBS, PAGE)
