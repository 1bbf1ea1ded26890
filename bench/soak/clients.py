"""Clients of a soak: each asks for one request after another and compares what comes with the undisturbed run."""

import asyncio
import random
import time
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import zip_longest

from bench.soak.work import Kind, fate, kinds
from shared.errors import Aborted, DeadlineExceeded, QueueFull, TandemError, Unavailable
from tandem import AsyncClient, Completion, Delta
from tandem.values import completion_from

ASK_AGAIN_S = 0.2
SLOW_S = 0.05
LATE_S = (0.02, 0.5)
MOST_ASKED_S = 120.0
"""That nobody accepts a request before it counts as lost."""
EXPECTED = {"aborted": Aborted, "late": DeadlineExceeded}
"""What a request of this fate may end with."""


@dataclass(slots=True)
class Tally:
    """How requests ended."""

    started: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    """complete, aborted, left, late; and lost, which none should be."""
    kinds: dict[str, int] = field(default_factory=dict)
    asked_again: int = 0
    """Times that nobody accepted a request, as while the scheduler restarts."""
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    wrong_tokens: int = 0
    tokens: int = 0
    longest_pause_s: float = 0.0
    """Between two messages of a stream that was read at once."""

    @property
    def ended(self) -> int:
        """Requests that are over."""
        return sum(self.ends.values())


class Clients:
    """Ask until told to stop; what has begun then ends."""

    def __init__(self, client: AsyncClient, seed: int, count: int, pause: float) -> None:
        """`pause`: seconds of each between the end of a request and its next one."""
        self.tally = Tally()
        self._client = client
        self._kinds = kinds()
        self._expected: list[Completion] = []
        self._random = random.Random(seed)
        self._count = count
        self._pause = pause
        self._began = 0.0
        self._stopping = False

    async def learn(self) -> None:
        """The undisturbed run: every request once, before anything happens."""
        asked = (self._client.complete(kind.prompt, **kind.options) for kind in self._kinds)
        self._expected = await asyncio.gather(*asked)

    async def run(self) -> None:
        """Until `stop`, then until the last one has ended."""
        self._began = time.monotonic()
        await asyncio.gather(*(self._ask_on() for _ in range(self._count)))

    def stop(self) -> None:
        """No further request begins."""
        self._stopping = True

    async def _ask_on(self) -> None:
        while not self._stopping:
            number = self._random.randrange(len(self._kinds))
            kind, how = self._kinds[number], fate(self._random)
            self.tally.started += 1
            _count(self.tally.kinds, kind.name)
            end = await self._ask(kind, self._expected[number], how)
            _count(self.tally.ends, end)
            await asyncio.sleep(self._pause)

    async def _ask(self, kind: Kind, expected: Completion, how: str) -> str:
        """How it ended. One that nobody accepts is asked for again, as any caller would."""
        deltas: list[Delta] = []
        began = time.monotonic()
        end = ""
        while not end:
            try:
                end = await self._read(kind, how, deltas)
            except (Unavailable, QueueFull) as error:
                if deltas or time.monotonic() - began > MOST_ASKED_S:
                    return self._lost(kind, how, deltas, error)
                self.tally.asked_again += 1
                await asyncio.sleep(ASK_AGAIN_S)
            except TandemError as error:
                if not isinstance(error, EXPECTED.get(how, ())):
                    return self._lost(kind, how, deltas, error)
                end = how
        self._compare(kind, expected, deltas, whole=end == "complete")
        return end

    def _lost(self, kind: Kind, how: str, deltas: list[Delta], error: Exception) -> str:
        at = time.monotonic() - self._began
        found = f"{at:.1f} s: {kind.name}, {how}, after {len(deltas)} messages: {type(error).__name__}: {error}"
        self.tally.lost.append(found)
        return "lost"

    async def _read(self, kind: Kind, how: str, deltas: list[Delta]) -> str:
        timeout = {"timeout": self._random.uniform(*LATE_S)} if how == "late" else {}
        options = {**kind.options, "priority": self._random.randrange(3), **timeout}
        stream = self._client.generate(kind.prompt, **options)
        last = time.monotonic()
        async with stream, aclosing(aiter(stream)) as reading:  # type: ignore[type-var]
            async for delta in reading:
                now = time.monotonic()
                if how == "read":
                    self.tally.longest_pause_s = max(self.tally.longest_pause_s, now - last)
                last = now
                deltas.append(delta)
                self.tally.tokens += len(delta.token_ids)
                if how == "slow":
                    await asyncio.sleep(SLOW_S)
                if how == "left" and len(deltas) == 3:
                    return "left"
                if how == "aborted" and len(deltas) == 3:
                    await self._abort(stream.request_id)
        return "complete"

    async def _abort(self, request_id: str) -> None:
        with suppress(Unavailable, DeadlineExceeded):  # the scheduler is away: the request goes on
            await self._client.abort(request_id)

    def _compare(self, kind: Kind, expected: Completion, deltas: list[Delta], *, whole: bool) -> None:
        """All of a request that was read to its end, a beginning of any other."""
        for sample in expected.samples:
            own = [delta for delta in deltas if delta.index == sample.index]
            tokens = [token for delta in own for token in delta.token_ids]
            wanted = sample.token_ids if whole else sample.token_ids[: len(tokens)]
            wrong = sum(one != other for one, other in zip_longest(tokens, wanted))
            text = "".join(delta.text for delta in own)
            if wrong or (text != sample.text if whole else not sample.text.startswith(text)):
                self.tally.wrong_tokens += wrong
                self.tally.wrong.append(f"{kind.name} {sample.index}: {tokens}, not {list(wanted)}; {text!r}")
        if whole and not _same(completion_from("", 0, deltas), expected):
            self.tally.wrong.append(f"{kind.name}: logprobs, ends or usage differ")


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def _same(one: Completion, other: Completion) -> bool:
    """But for what the cache had."""
    pairs = zip(one.samples, other.samples, strict=True)
    return all(
        (mine.finish, mine.logprobs, mine.prompt_logprobs, mine.usage.completion_tokens)
        == (theirs.finish, theirs.logprobs, theirs.prompt_logprobs, theirs.usage.completion_tokens)
        for mine, theirs in pairs
    )
