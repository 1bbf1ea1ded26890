"""`make demo`: a trained model streams text through a scheduler and a worker, and the worker is killed in the middle.

Prints two answers to one prompt, kills the worker during the second with the signal that no process can catch, and
checks that both are the same text.
"""

import asyncio
import os
import sys
import time

from rich.console import Console

from shared.ports import find_free
from shared.process import STARTUP_FAILED, stop_signals
from shared.telemetry import configure_logging
from tandem.async_client import AsyncClient
from tandem.serve import ServeConfig, Service
from tandem.talk import show

PROMPT = "It is a truth universally acknowledged"
MAX_TOKENS = 200
KILL_AFTER_TOKENS = 60
INTERRUPTED = 130

_console = Console(highlight=False)


async def main() -> int:
    """Exit status 0 if both answers are the same, 130 after Ctrl-C, STARTUP_FAILED where a process can't start."""
    os.environ.setdefault("TANDEM_LOG_LEVEL", "ERROR")  # for the children too: this is about their output
    configure_logging("demo")
    config = ServeConfig(port=find_free("127.0.0.1"))
    _console.rule("Starting a scheduler process and a worker process")
    with stop_signals() as stopped:
        service = Service(config, "tiny", worker_arguments=["--dtype", "float32"])
        telling = asyncio.create_task(_tell(service))
        ends = [asyncio.create_task(stopped.wait()), asyncio.create_task(service.family.failed())]
        try:
            await asyncio.wait([telling, *ends], return_when=asyncio.FIRST_COMPLETED)
            if telling.done():
                return 0 if telling.result() else 1
            return INTERRUPTED if stopped.is_set() else STARTUP_FAILED
        finally:
            for task in (telling, *ends):
                task.cancel()
            stopped.clear()
            await service.stop(stopped)


async def _tell(service: Service) -> bool:
    """Whether both answers are the same."""
    started = time.monotonic()
    await service.ready()
    _console.print(f"ready after {time.monotonic() - started:.1f} s", style="dim")
    _console.rule("A trained Qwen3 model streams its answer")
    undisturbed = await _stream(service, kill=False)
    _console.rule("The same again, but the worker is killed in the middle")
    disturbed = await _stream(service, kill=True)
    same = undisturbed == disturbed
    _console.rule("Both answers are the same text" if same else "THE ANSWERS DIFFER")
    return same


async def _stream(service: Service, *, kill: bool) -> str:
    """Prints an answer as it comes and returns it."""
    text, tokens, started = "", 0, time.monotonic()
    print(PROMPT, end="")
    async with AsyncClient(service.endpoint) as client:
        async for delta in client.generate(PROMPT, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True):
            text, tokens = text + delta.text, tokens + len(delta.token_ids)
            show(delta, started)
            if kill and tokens >= KILL_AFTER_TOKENS:
                kill = False
                worker = service.family.children["worker-0"]
                worker.kill()
                _console.print(
                    f" [kill -9 {worker.pid}: the worker is dead; another starts]", style="red", markup=False
                )
    return text


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
