"""The core process: `python -m scheduler_svc.core_process --config JSON --socket PATH`."""

import argparse
import asyncio
import gc
import secrets
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import uvloop
from prometheus_client.core import Metric

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core_metrics import core_metrics
from scheduler_svc.engine import Engine
from scheduler_svc.process_metrics import process_metrics
from scheduler_svc.served_core import Outgrown
from scheduler_svc.snapshots import push
from shared.errors import StartupError
from shared.model_config import load_model_config
from shared.process import STARTUP_FAILED, die_with_parent, stop_signals
from shared.settings import from_json
from shared.telemetry import configure_logging

GC_THRESHOLD = 100_000
"""Allocations between collections: at the default of 700 a collection would stop the loop every few steps."""


async def serve(config: SchedulerConfig, scheduler: int, socket_path: str, metrics_socket: Path | None) -> None:
    """Until SIGTERM. Raises StartupError where the workers serve another model."""
    model = load_model_config(config.model, config.model_name)
    own = {"scheduler": scheduler, "instance": secrets.randbits(64), "hash_seed": secrets.randbits(64)}
    engine = Engine(config, model.fingerprint, **own)
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    with stop_signals() as stopped:
        telling = asyncio.create_task(push(metrics_socket, partial(_metrics, engine, model.name)))
        running = asyncio.create_task(engine.run(socket_path))
        stopping = asyncio.create_task(stopped.wait())
        await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
        for task in (running, stopping, telling):
            task.cancel()
        await asyncio.wait([telling])
        try:
            await running
        except asyncio.CancelledError:
            return


def _metrics(engine: Engine, model_name: str) -> Iterator[Metric]:
    yield from process_metrics("core")
    yield from core_metrics(engine, model_name)


def main() -> int:
    """Exit status 0, or STARTUP_FAILED after one line on standard error."""
    die_with_parent()
    parser = argparse.ArgumentParser(description="The core process of a scheduler")
    parser.add_argument("--config", required=True, type=partial(from_json, SchedulerConfig))
    parser.add_argument("--scheduler", required=True, type=int, help="the id that peers know, the same for every core")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--metrics-socket", type=Path, help="where the parent takes metrics; not given: nowhere")
    arguments = parser.parse_args()
    configure_logging("core")
    try:
        uvloop.run(serve(arguments.config, arguments.scheduler, arguments.socket, arguments.metrics_socket))
    except StartupError as error:
        print(f"tandem scheduler: {error}", file=sys.stderr)
        return STARTUP_FAILED
    except Outgrown as error:
        print(f"tandem scheduler: {error}: the core starts again", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
