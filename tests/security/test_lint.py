"""The linter refuses what would make code of data. A rule that refuses nothing would go unnoticed otherwise."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

REFUSED = [
    "import pickle",
    "from marshal import loads",
    "import shelve",
    "from multiprocessing import Process",
    "from concurrent.futures import ProcessPoolExecutor",
    "import torch\n\ntorch.load('file')",
    "import torch\n\ntorch.distributed.broadcast_object_list([])",
    "from torch.distributed import all_gather_object",
    "eval('1')",
    "exec('1')",
    "import subprocess\n\nsubprocess.run('ls', shell=True)",
    "import os\n\nos.system('ls')",
    "import yaml\n\nyaml.load('')",
]


@pytest.mark.parametrize("folder", ["shared", "scheduler_svc", "worker_svc", "tandem"])
def test_no_pickle_no_eval_no_shell(folder: str) -> None:
    """All in one file: ruff tells the line of each."""
    code = "".join(f"# {number}\n{snippet}\n" for number, snippet in enumerate(REFUSED))
    starts = [number for number, line in enumerate(code.splitlines(), start=1) if line.startswith("# ")]
    command = [sys.executable, "-m", "ruff", "check", "--output-format", "concise", "--stdin-filename"]
    result = subprocess.run(
        [*command, f"{folder}/module.py", "-"], input=code, capture_output=True, text=True, cwd=ROOT
    )
    told = {int(line.split(":")[1]) for line in result.stdout.splitlines() if " S" in line or " TID251 " in line}
    ends = [*starts[1:], len(code.splitlines()) + 1]
    assert [
        snippet
        for snippet, start, end in zip(REFUSED, starts, ends, strict=True)
        if not any(start < line < end for line in told)
    ] == []
