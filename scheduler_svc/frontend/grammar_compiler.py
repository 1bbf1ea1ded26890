"""Compiles grammars within a time limit, without holding up anything else, and keeps those compiled last.

A compilation can't be stopped, so every new grammar is tried in a process first (grammar_check), which can be killed;
then it is compiled here, in a thread.
"""

import asyncio
import json
import socket
import subprocess
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from scheduler_svc.frontend.constraint import Constraint, MinTokens
from scheduler_svc.frontend.grammars import Grammar
from scheduler_svc.frontend.matcher import GrammarError, GrammarTokenizer, Matcher, compile_grammar
from scheduler_svc.frontend.thoughts import AfterThought
from shared.errors import InvalidRequest, RequestFailed
from shared.process import exited, spawn

CHECKERS = 2
"""Processes, each started when it is first needed: one slow grammar must not hold up all others."""
THREADS = 2
"""For compilation and masks. llguidance lets go of the interpreter while it works."""
KEPT_GRAMMARS = 64
_MAX_ANSWER_BYTES = 1 << 20


class GrammarCompiler:
    """Grammar in, matcher out."""

    def __init__(self, model: Path, tokenizer: GrammarTokenizer, timeout: float) -> None:
        """`model` is the folder that the processes read their tokenizer from; `timeout` in seconds."""
        self._model = model
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
        self._timeout = timeout
        self._free = asyncio.Semaphore(CHECKERS)
        self._idle: list[_Checker] = []
        self._compiled: OrderedDict[Grammar, Matcher] = OrderedDict()

    async def begin(
        self, grammar: Grammar, min_tokens: MinTokens, output: Sequence[int], thought_end: int | None
    ) -> Constraint:
        """The constraint of a sample that goes on after `output`; where `thought_end` is a token, the grammar begins
        after that one. Raises InvalidRequest where it can't."""
        matcher = await self.compile(grammar)
        whole = matcher if thought_end is None else AfterThought(matcher, thought_end, self._tokenizer.free)
        constraint = Constraint(grammar.field, whole, min_tokens, self._threads)
        await constraint.begin(output)
        return constraint

    async def compile(self, grammar: Grammar) -> Matcher:
        """A matcher of its own at the beginning of an output. Raises InvalidRequest with the parser's message."""
        if grammar not in self._compiled:
            async with self._free:
                if grammar not in self._compiled:  # the same one may have been compiled meanwhile
                    await self._compile(grammar)
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar].copy()

    async def _compile(self, grammar: Grammar) -> None:
        checker = self._idle.pop() if self._idle else await _Checker.start(self._model)
        try:
            async with asyncio.timeout(self._timeout):
                problem = await checker.check(grammar)
        except TimeoutError:
            problem = f"takes longer than {self._timeout:g} s to compile"
        finally:
            if checker.is_busy:
                checker.end()
            else:
                self._idle.append(checker)
        if problem:
            raise InvalidRequest(grammar.field, problem)
        await self._keep(grammar)

    async def _keep(self, grammar: Grammar) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._compiled[grammar] = await loop.run_in_executor(
                self._threads, compile_grammar, grammar, self._tokenizer
            )
        except GrammarError as error:
            raise InvalidRequest(grammar.field, str(error)) from None
        if len(self._compiled) > KEPT_GRAMMARS:
            self._compiled.popitem(last=False)

    def close(self) -> None:
        """Ends the processes, and the threads after what they are doing."""
        for checker in self._idle:
            checker.end()
        self._threads.shutdown(cancel_futures=True)


class _Checker:
    """One process of grammar_check."""

    def __init__(self, process: "subprocess.Popen[bytes]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._process = process
        self._reader = reader
        self._writer = writer
        self.is_busy = True
        """It owes an answer: all that can be done is to end it."""
        self._ending: asyncio.Task[int] | None = None

    @classmethod
    async def start(cls, model: Path) -> "_Checker":
        """Returns when it is ready. Raises RequestFailed if it can't start."""
        ours, its = socket.socketpair()
        with its:
            process = spawn("scheduler_svc.frontend.grammar_check", ["--model", str(model)], stdio=its)
        checker = cls(process, *await asyncio.open_unix_connection(sock=ours, limit=_MAX_ANSWER_BYTES))
        try:
            if await checker._answer() is None:
                raise RequestFailed("the process that checks grammars can't start; the scheduler's log has the details")
        finally:
            if checker.is_busy:
                checker.end()
        return checker

    async def check(self, grammar: Grammar) -> str:
        """What is wrong with the grammar, empty if nothing is. One that is cancelled leaves it busy."""
        self.is_busy = True
        self._writer.write(json.dumps(asdict(grammar)).encode() + b"\n")
        answer = await self._answer()
        return answer if answer is not None else "needs too much memory to compile"

    async def _answer(self) -> str | None:
        """None if the process ended."""
        try:
            line = await self._reader.readline()
        except ConnectionError:
            return None
        if not line:
            return None
        self.is_busy = False
        return str(json.loads(line)) if line.strip() else ""

    def end(self) -> None:
        """Whatever it is doing. Does not wait until the system has taken its memory back."""
        self._writer.close()
        self._process.kill()
        self._ending = asyncio.create_task(exited(self._process))
