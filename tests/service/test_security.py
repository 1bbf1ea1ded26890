"""Scheduler and worker as processes of their own, TLS with certificates on both ends, and tokens: files that change
under load, tenants, and what of secrets can be seen from outside."""

import asyncio
import json
import os
import secrets
import signal
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.utils import floatToGoString

from shared.ports import find_free
from shared.rpc import until_serving
from tandem import AsyncClient, Client, ClientSecurity, Completion, PermissionDenied, Unauthenticated, Unavailable
from tests.patience import PATIENCE_S
from tests.security.authority import LONG_AGO, Authority
from tests.service.standing_still import StandingStill

PROMPT = "Xyzzy and plugh are words that no other test has, and this is long enough for some blocks of sixteen tokens"
BLOCK_SIZE = 16
PORTS = ("worker", "scheduler", "health", "worker health", "worker metrics", "scheduler metrics")
SAMPLED: dict[str, Any] = {"max_tokens": 120, "temperature": 1.0, "ignore_eos": True}


class Secured:
    """A worker and a scheduler, each with a folder of its own files, and their callers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.still = StandingStill(folder)
        self.outer, self.inner = Authority(folder, "outer"), Authority(folder, "inner")
        self.tokens = {name: secrets.token_hex(16) for name in ("operator", "red", "blue", "worker")}
        self.sign()
        for name, token in self.tokens.items():
            (folder / f"{name}.token").write_text(f"{token}\n")
        self.allow("operator", "red", "blue")
        self.ports = {name: find_free("127.0.0.1") for name in PORTS}
        self.endpoint = f"127.0.0.1:{self.ports['scheduler']}"
        self.log = folder / "log"
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def sign(self) -> None:
        """Certificates for everybody. The scheduler's is seen by clients and by the worker; the worker's has a name."""
        self.outer.sign("scheduler")
        self.inner.sign("worker", "localhost")
        self.outer.sign("client", "client.example")

    def allow(self, *names: str) -> None:
        """Whose tokens count."""
        lines = [self.tokens[name] if name == "operator" else f"{name} {self.tokens[name]}" for name in names]
        (self.folder / "tokens").write_text("\n".join(["# who may call", *lines, ""]))

    def start(self, name: str, *arguments: str) -> None:
        """Returns when it is ready."""
        own = ["--model", "tiny", "--port", str(self.ports[name]), "--tls-client-ca", f"{self.folder}/outer.pem"]
        own += ["--tls-cert", f"{self.folder}/{name}.pem", "--tls-key", f"{self.folder}/{name}.key"]
        own += ["--metrics-port", str(self.ports[f"{name} metrics"]), *self.still.arguments]
        environment = {**os.environ, **self.still.env, "TANDEM_LOG_LEVEL": "DEBUG", "TMPDIR": str(self.folder)}
        with self.log.open("a") as log:
            process = self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "tandem", name, *own, *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        assert process.stdout is not None and "ready" in process.stdout.readline(), self.log.read_text()

    def start_worker(self) -> None:
        sizes = ["--dtype", "float64", "--kv-cache-memory", "64", "--block-size", str(BLOCK_SIZE)]
        probed = ["--health-port", str(self.ports["worker health"])]
        self.start("worker", *sizes, *probed, "--token-file", f"{self.folder}/worker.token")

    def start_scheduler(self) -> None:
        dialing = ["--workers", f"dns:///localhost:{self.ports['worker']}", "--tls-ca", f"{self.folder}/inner.pem"]
        dialing += ["--worker-token-file", f"{self.folder}/worker.token"]
        limits = ["--token-file", f"{self.folder}/tokens", "--health-port", str(self.ports["health"])]
        self.start("scheduler", *dialing, *limits, "--frontends", "2")
        serving = until_serving(f"127.0.0.1:{self.ports['health']}", "tandem.Active")
        asyncio.run(asyncio.wait_for(serving, PATIENCE_S))

    def stop(self) -> None:
        for name in ("scheduler", "worker"):
            if name in self.processes:
                self.processes[name].send_signal(signal.SIGTERM)
                assert self.processes[name].wait(PATIENCE_S) == 0, self.log.read_text()

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()

    def security(self, name: str = "operator") -> ClientSecurity:
        return ClientSecurity(**{option: self.folder / file for option, file in self._files(name).items()})

    def flags(self, name: str = "operator") -> list[str]:
        given = self._files(name).items()
        return [word for option, file in given for word in (f"--{option.replace('_', '-')}", f"{self.folder}/{file}")]

    def environment(self, name: str = "operator") -> dict[str, str]:
        given = self._files(name).items()
        return {f"TANDEM_{option.upper()}": f"{self.folder}/{file}" for option, file in given}

    def _files(self, name: str) -> dict[str, str]:
        return {
            "tls_ca": "outer.pem",
            "tls_cert": "client.pem",
            "tls_key": "client.key",
            "token_file": f"{name}.token",
        }

    def metrics(self, name: str) -> str:
        url = f"http://127.0.0.1:{self.ports[f'{name} metrics']}/metrics"
        return str(urllib.request.urlopen(url, timeout=PATIENCE_S).read().decode())

    def client(self, name: str = "operator", **options: Any) -> Client:
        return Client(self.endpoint, security=self.security(name), **options)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    secured = _started(tmp_path_factory)
    try:
        yield secured
        secured.stop()
    finally:
        secured.kill()


def _started(folders: pytest.TempPathFactory) -> Secured:
    """A port that was free may be taken before it is bound, by what else runs: then with others."""
    while True:
        secured = Secured(folders.mktemp("secured"))
        try:
            secured.start_worker()
            secured.start_scheduler()
            return secured
        except BaseException:
            secured.kill()
            if "can't listen on" not in secured.log.read_text():
                raise


async def complete_all(client: AsyncClient) -> list[Completion]:
    return list(await asyncio.gather(*(client.complete(PROMPT, seed=seed, **SAMPLED) for seed in range(8))))


def test_authorities_certificates_and_tokens_change_under_load_and_nothing_is_lost(secured: Secured) -> None:
    """The worker dies in the middle, so that both ends of the plan stream need what is new. The oracle is the run
    before, in float64; meanwhile connections are opened all the time."""

    async def change() -> None:
        secured.outer.renew(), secured.inner.renew()
        await asyncio.sleep(0.3)
        secured.sign()
        secured.tokens |= {name: secrets.token_hex(16) for name in ("operator", "worker")}
        for name in ("operator", "worker"):  # a client that dials within this moment shows what no longer counts
            (secured.folder / f"{name}.token").write_text(secured.tokens[name])
        secured.allow("operator", "red", "blue")
        secured.outer.settle(), secured.inner.settle()
        worker = secured.processes["worker"]
        worker.kill()
        worker.wait()
        await asyncio.to_thread(secured.start_worker)

    async def dial(stopped: asyncio.Event) -> int:
        count = 0
        while not stopped.is_set():
            async with AsyncClient(secured.endpoint, 1, security=secured.security("red"), resume_timeout=60) as client:
                await client.complete("and", max_tokens=1)
            count += 1
        return count

    async def scenario() -> None:
        async with AsyncClient(secured.endpoint, security=secured.security()) as client:
            undisturbed = await complete_all(client)
            stopped = asyncio.Event()
            dialing = asyncio.create_task(dial(stopped))
            streams = asyncio.create_task(complete_all(client))
            await asyncio.sleep(0.2)
            await change()
            disturbed = await streams
            again = await complete_all(client)  # by the channels that it made anew
            stopped.set()
            assert await dialing > 20
        expected = [(one.samples[0].token_ids, one.text) for one in undisturbed]
        assert expected == [(one.samples[0].token_ids, one.text) for one in disturbed]
        assert expected == [(one.samples[0].token_ids, one.text) for one in again]

    old = secured.folder / "old.pem"
    old.write_bytes(secured.outer.file.read_bytes())
    asyncio.run(asyncio.wait_for(scenario(), 2 * PATIENCE_S))
    trusting = ClientSecurity(tls_ca=old, tls_cert=secured.security().tls_cert, tls_key=secured.security().tls_key)
    with Client(secured.endpoint, security=trusting) as client, pytest.raises(Unavailable, match="--tls-ca"):
        client.load()


def test_who_is_started_again_while_the_file_holds_an_expired_certificate_starts(secured: Secured) -> None:
    """Nobody new gets in, but the next certificate is served; until then metrics tell, and the log says why."""
    ends = "tandem_tls_certificate_expiry_timestamp_seconds{flag="
    secured.outer.sign("scheduler", **LONG_AGO)
    children = psutil.Process(secured.processes["scheduler"].pid).children()
    for child in children:
        child.kill()
    psutil.wait_procs(children, timeout=PATIENCE_S)
    with secured.client(resume_timeout=0) as client, pytest.raises(Unavailable):
        client.load()
    assert f'{ends}"--tls-cert"}} {floatToGoString(LONG_AGO["not_after"].timestamp())}' in secured.metrics("scheduler")
    probed = until_serving(f"127.0.0.1:{secured.ports['health']}", "liveness")
    asyncio.run(asyncio.wait_for(probed, PATIENCE_S))
    secured.sign()
    with secured.client() as client:
        assert client.complete("and", max_tokens=1).text
    for name in ("scheduler", "worker"):
        assert {f'{ends}"--{file}"' in secured.metrics(name) for file in ("tls-cert", "tls-client-ca")} == {True}


def test_a_storm_of_connections_meets_new_certificates_and_ends_no_process(secured: Secured) -> None:
    def processes() -> set[int]:
        return {child.pid for child in psutil.Process(secured.processes["scheduler"].pid).children(recursive=True)}

    async def connect() -> None:
        async with AsyncClient(secured.endpoint, 1, security=secured.security()) as client:
            await client.load()

    async def storm() -> None:
        await asyncio.gather(*(connect() for _ in range(128)))

    before = processes()
    secured.outer.renew()
    secured.sign()
    secured.outer.settle()
    asyncio.run(asyncio.wait_for(storm(), PATIENCE_S))
    assert processes() == before


def test_a_tenant_neither_finds_nor_times_what_another_one_cached(secured: Secured) -> None:
    def cached(name: str, **options: Any) -> int:
        with secured.client(name) as client:
            return client.complete(f"Tenants: {PROMPT}", max_tokens=1, **options).samples[0].usage.cached_tokens

    assert cached("red") == 0
    hit = cached("red")
    assert hit >= 2 * BLOCK_SIZE
    assert cached("blue") == cached("operator") == cached("red", cache_salt="mine") == 0
    assert cached("blue", cache_salt="mine") == 0
    assert cached("blue") == cached("operator") == cached("red", cache_salt="mine") == hit


def test_a_tenant_reaches_only_its_own_requests_and_no_call_of_the_operator(secured: Secured) -> None:
    with secured.client("red") as red, secured.client("blue") as blue, secured.client() as operator:
        options: dict[str, Any] = {"request_id": "one", "max_tokens": 1900, "ignore_eos": True}
        with red.generate(PROMPT, **options) as stream, blue.generate(PROMPT, **options) as other:
            reds, blues = iter(stream), iter(other)
            assert next(reds).token_ids and next(blues).token_ids
            with secured.still.now():
                assert blue.abort("one") and not blue.abort("one")
                assert red.abort("one")
        for tenant in (red, blue):
            assert tenant.load().max_running
            with pytest.raises(PermissionDenied, match="operator"):
                tenant.stats()
        assert operator.stats(max_requests=256).latest


def test_a_token_that_is_taken_off_the_list_ends_with_the_next_call(secured: Secured) -> None:
    with secured.client("red") as red, secured.client("blue") as blue:
        assert red.load() and blue.load()
        secured.allow("operator", "blue")
        with pytest.raises(Unauthenticated, match="--token-file"):
            red.load()
        assert blue.load()
        secured.allow("operator", "red", "blue")
        assert red.load()


def test_probes_reach_both_processes_in_plain_text(secured: Secured) -> None:
    async def scenario() -> None:
        for name in ("worker health", "health"):
            for service in ("liveness", "readiness"):
                await asyncio.wait_for(until_serving(f"127.0.0.1:{secured.ports[name]}", service), PATIENCE_S)

    asyncio.run(scenario())


def test_every_command_takes_the_same_flags_and_variables(secured: Secured, tmp_path: Path) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 2}}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    commands = {
        "generate": ["Once upon a time", "--max-tokens", "4"],
        "top": ["--once", "--interval", "0.1"],
        "batch": [str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")],
        "bench": ["--num-prompts", "2", "--input-len", "4", "--output-len", "2", "--clients", "1"],
    }

    def start(name: str, *arguments: str, **env: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "tandem", name, "--endpoint", secured.endpoint, *arguments]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env={**os.environ, **env}, **pipes)

    running = [start(name, *arguments, *secured.flags()) for name, arguments in commands.items()]
    running.append(start("generate", "Once", "--max-tokens", "4", **secured.environment()))
    for process in running:
        output, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0 and (output or "batch" in process.args), errors
    without = start("generate", "Once", "--tls-ca", f"{secured.folder}/outer.pem")
    _, errors = without.communicate(timeout=PATIENCE_S)
    assert without.returncode == 1 and "--tls-cert" in errors and "Traceback" not in errors


def test_processes_tell_nothing_of_secrets_and_let_no_other_user_in(secured: Secured) -> None:
    """At the log level DEBUG; also where any user of the machine can look: command lines, sockets, files."""
    with secured.client() as client:
        answer = client.complete(PROMPT, max_tokens=60, ignore_eos=True).text
    children = [
        process
        for parent in secured.processes.values()
        for process in (psutil.Process(parent.pid), *psutil.Process(parent.pid).children(recursive=True))
    ]
    seen = secured.log.read_text() + "".join(str((child.cmdline(), child.environ())) for child in children)
    for name in ("worker", "scheduler"):
        seen += secured.metrics(name)
    keys = [file.read_text().splitlines()[1] for file in secured.folder.glob("*.key")]
    for secret in (*secured.tokens.values(), *keys, "Xyzzy", "plugh", "Once upon", answer, repr(answer)[1:-1]):
        assert secret not in seen
    assert '"request"' in seen and "tandem_requests_total" in seen, "requests are logged and counted"
    private = list(secured.folder.glob(".tandem-*/core.sock"))
    assert private
    for socket in private:
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700


def test_a_worker_is_drained_only_by_who_may_call_it(secured: Secured) -> None:
    """The last test: the worker gets nothing any more."""
    command = [sys.executable, "-m", "tandem", "drain", f"localhost:{secured.ports['worker']}"]
    command += ["--tls-ca", f"{secured.folder}/inner.pem"]
    shown = ["--tls-cert", f"{secured.folder}/scheduler.pem", "--tls-key", f"{secured.folder}/scheduler.key"]
    token = ["--token-file", f"{secured.folder}/worker.token"]
    for flags, problem in ((token, "--tls-cert"), (shown, "a token is needed"), ([*shown, *token], "")):
        result = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=PATIENCE_S)
        assert (result.returncode == 0) == (not problem) and problem in result.stderr, result.stderr
