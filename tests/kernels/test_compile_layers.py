"""The kernels of a model's layers compile for the GPUs that they are made for, where there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels import COMPILED


@pytest.mark.skipif(COMPILED, reason="the other tests compile them")
def test_the_kernels_of_layers_compile_for_hopper(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_layers"]
    run = subprocess.run(
        command, env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert {"_attention_kernel", "_down_kernel", "_few_tokens_kernel", "_tiled_linear_kernel"} <= {*run.stdout.split()}
