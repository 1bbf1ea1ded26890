"""A frontend's link to a core that may send anything: its samples must end, each once, and the link must go on."""

import asyncio
import contextlib
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from scheduler_svc.frontend.core_link import CoreLink
from scheduler_svc.frontend.generation import Generation
from scheduler_svc.frontend.vocabulary import Vocabulary, load_tokenizer
from shared.errors import TandemError
from shared.framing import read_message, write_message
from shared.pb import core_pb2
from shared.pb import generation_pb2 as pb
from shared.wire import pack
from tandem.models import model_folder
from tests.patience import PATIENCE_S

VOCABULARY_SIZE = 2048
STATE = core_pb2.CoreMessage(
    state=core_pb2.CoreState(
        active=True, progressing=True, model=core_pb2.ServedModel(vocabulary_size=VOCABULARY_SIZE, context_limit=64)
    )
)
MOST = 1000
PROMPT = pack(np.arange(5, dtype=np.int32))


class LinkEdge:
    """Frontends' links, each to a core that sends what it is told and then to one that is right."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._scratch = TemporaryDirectory()
        self._path = Path(self._scratch.name) / "core"
        self._vocabulary = Vocabulary(load_tokenizer(model_folder("tiny")))

    def take(self, payloads: list[bytes]) -> None:
        """What the first core sends while two samples run. Raises what would end the frontend."""
        self._loop.run_until_complete(asyncio.wait_for(self._take(payloads), PATIENCE_S))

    async def _take(self, payloads: list[bytes]) -> None:
        core = _Core(payloads)
        link = CoreLink(self._path, PATIENCE_S)
        async with await asyncio.start_unix_server(core.serve, self._path):
            running = asyncio.create_task(link.run())
            await link.ready()
            calls = [self._call(number) for number in range(2)]
            for call in calls:
                link.submit(call.samples)
            core.sending.set()
            ends = asyncio.gather(*map(_ended, calls))
            await asyncio.wait((ends, running), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            for end in await ends:
                assert isinstance(end, TandemError) or end <= MOST, end
            for call in calls:
                link.cancel(call.samples)
            assert link.held == 0, "a sample that ended is not forgotten"
            running.cancel()
            core.close()

    def _call(self, number: int) -> Generation:
        """One without logprobs, and one with all."""
        submission = core_pb2.Submit(request_id=str(number), prompt=PROMPT, max_tokens=50)
        if number:
            submission.sampling.logprobs = submission.sampling.prompt_logprobs = 2
        return Generation([submission], pb.GenerateResponse(), self._vocabulary, pb.GenerateRequest(), ())


class _Core:
    """Its first life sends the payloads once it is told to; the next one ends every sample by its length."""

    def __init__(self, payloads: list[bytes]) -> None:
        self._payloads = payloads
        self.sending = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []

    def close(self) -> None:
        """No connection remains."""
        for writer in self._writers:
            writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One life."""
        self._writers.append(writer)
        write_message(writer, STATE.SerializeToString())
        if len(self._writers) == 1:
            await self.sending.wait()
            for payload in self._payloads:
                write_message(writer, payload)
            writer.close()
            return
        with contextlib.suppress(OSError):
            while (payload := await read_message(reader)) is not None:
                submit = core_pb2.FrontendMessage.FromString(payload).submit
                if submit.handle:
                    write_message(writer, _end_of(submit).SerializeToString())


def _end_of(submit: core_pb2.Submit) -> core_pb2.CoreMessage:
    batch = core_pb2.TokenBatch()
    batch.ended.add(handle=submit.handle).length.SetInParent()
    return core_pb2.CoreMessage(tokens=batch)


async def _ended(call: Generation) -> TandemError | int:
    """The error, or how many tokens there were."""
    tokens = 0
    try:
        while (response := await call.next()) is not None:
            tokens += len(response.token_ids)
    except TandemError as error:
        return error
    return tokens
