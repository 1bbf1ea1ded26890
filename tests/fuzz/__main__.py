"""Fuzzes the edges with atheris, led by what code is reached: `python -m tests.fuzz [--seconds 60] [--edge NAME]`.

Each edge in a process of its own, since libFuzzer ends it. What it finds is printed as a Python value, and its exit
status is not 0. Where atheris has no wheel for this interpreter it says so and ends well.
"""

import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

MEMORY_MIB = 4096
SEEDS, SEED_BYTES = 64, 4096


def fuzz(name: str, seconds: int, corpus: str) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["shared", "scheduler_svc", "worker_svc", "tandem", "tests.fuzz"]):
        from tests.fuzz.edges import edge
    from hypothesis import HealthCheck, given, settings

    @settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(edge(name).inputs)
    def holds(value: object) -> None:
        edge(name).take(value)

    limits = [f"-max_total_time={seconds}", f"-rss_limit_mb={MEMORY_MIB}", "-timeout=60"]
    lengths = ["-len_control=0", f"-max_len={SEED_BYTES}"]
    atheris.Setup([sys.argv[0], *limits, *lengths, corpus], holds.hypothesis.fuzz_one_input)
    atheris.Fuzz()


def main(
    seconds: Annotated[int, typer.Option(help="for each edge")] = 60,
    edge: Annotated[str, typer.Option(help="this one alone")] = "",
) -> None:
    """All edges, one after the other."""
    if find_spec("atheris") is None:
        print(f"atheris has no wheel for Python {sys.version_info.major}.{sys.version_info.minor}: nothing is fuzzed")
        return
    from tests.fuzz.edges import EDGES

    failed = []
    for name in [edge] if edge else EDGES:
        print(f"{name}: {seconds} s", flush=True)
        with TemporaryDirectory() as corpus:
            for number in range(SEEDS):  # hypothesis makes nothing of a few bytes
                (Path(corpus) / str(number)).write_bytes(random.Random(number).randbytes(SEED_BYTES))
            command = [sys.executable, "-m", "tests.fuzz", "--one", name, str(seconds), corpus]
            if subprocess.run(command, check=False).returncode:
                failed.append(name)
    sys.exit(f"found something: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        fuzz(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        typer.run(main)
