"""Files of certificates and tokens: what is refused at the start, and what a change does while a server runs."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.config import SchedulerConfig, WorkerSecurity
from shared.certificates import Certificates
from shared.dialer import Dialer
from shared.errors import StartupError, Unauthenticated
from shared.reloaded import Reloaded
from shared.resolve import named
from shared.security import ClientSecurity, ServerSecurity, check_server
from shared.settings import from_json, to_json
from shared.tls import channel_credentials, server_credentials
from shared.tokens import Caller, OwnToken, Tokens
from tests.security.authority import LONG_AGO, Authority

RED, BLUE, NOBODY = "red" * 8, "blue" * 6, "nobody" * 4


def bearer(token: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "x"), ("authorization", f"Bearer {token}")]


def test_a_value_is_made_again_when_a_file_changes_and_only_then(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"1")
    value = Reloaded({"--file": file, "--none": None}, lambda content, nothing: [int(content), nothing])
    first = value.get()
    assert first == [1, None] and value.get() is first
    file.write_bytes(b"1")
    os.utime(file, (1, 1))
    assert value.get() is first, "it says the same"
    file.write_bytes(b"2")
    assert value.get() == [2, None]


def test_a_change_within_a_tick_of_the_clock_is_seen(tmp_path: Path) -> None:
    """Of the same size and with the same times."""
    file = tmp_path / "file"
    file.write_bytes(b"1")
    value = Reloaded({"--file": file}, int)
    before = file.stat()
    assert value.get() == 1
    file.write_bytes(b"2")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert value.get() == 2


def test_a_symbolic_link_may_change_as_kubernetes_does_it(tmp_path: Path) -> None:
    for number in "12":
        (tmp_path / number).mkdir()
        (tmp_path / number / "file").write_text(number)
        os.utime(tmp_path / number / "file", (1, 1))
    (tmp_path / "now").symlink_to("1")
    value = Reloaded({"--file": tmp_path / "now" / "file"}, int)
    assert value.get() == 1
    (tmp_path / "next").symlink_to("2")
    (tmp_path / "next").rename(tmp_path / "now")
    assert value.get() == 2


@pytest.mark.parametrize("damage", [lambda file: file.write_text("x"), lambda file: file.unlink()])
def test_what_was_there_counts_while_a_change_cant_be_used(damage: Any, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "file"
    file.write_text("1")
    value = Reloaded({"--file": file}, int)
    damage(file)
    assert [value.get() for _ in range(3)] == [1, 1, 1]
    assert capsys.readouterr().out.count("can't be used") == 1, "told once"
    file.write_text("2")
    assert value.get() == 2


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "has no token"),
        ("# nothing\n\n", "has no token"),
        ("short", "line 1: a token has at least 16"),
        (f"{RED}\nred team {BLUE}", "line 2: TOKEN or TENANT TOKEN"),
        ("a-tenant-of-a-long-name ", "line 1: white space beside one word"),
        (f"{RED}\n {BLUE}", "line 2: white space beside one word"),
        (f"a/b {RED}", "line 1: TOKEN or TENANT TOKEN"),
        (f"red {RED}\nblue {RED}", "line 2: another tenant has this token"),
        (f"r\u00e9d {RED}", "not ASCII"),
    ],
)
def test_a_bad_token_file_is_refused_by_line_and_without_its_tokens(content: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(content)
    with pytest.raises(StartupError, match=problem) as error:
        Tokens(file)
    assert str(file) in str(error.value) and RED not in str(error.value)


def test_tokens_are_known_by_tenant_and_several_are_one_tenants(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# ours\n{NOBODY}\r\n\n  red\t{RED}\nred {RED}2\n")
    tokens = Tokens(file)
    assert tokens.caller(bearer(NOBODY)) == Caller()
    assert tokens.caller(bearer(RED)) == tokens.caller(bearer(RED + "2")) == Caller("red")
    assert tokens.caller([("authorization", f"bearer  {RED} ")]) == Caller("red"), "the scheme's case is no matter"
    file.write_text(f"blue {BLUE}")
    assert tokens.caller(bearer(BLUE)) == Caller("blue")
    with pytest.raises(Unauthenticated, match="--token-file"):
        tokens.caller(bearer(RED))


@pytest.mark.parametrize(
    "metadata",
    [[], [("authorization", RED)], [("authorization", f"Basic {RED}")], [("authorization", b"Bearer " + RED.encode())]],
)
def test_whoever_shows_no_bearer_token_is_told_how(metadata: Any, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(RED)
    with pytest.raises(Unauthenticated, match="authorization: Bearer TOKEN"):
        Tokens(file).caller(metadata)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    file = tmp_path_factory.mktemp("known") / "tokens"
    file.write_text(RED)
    return Tokens(file)


@given(st.text(max_size=40) | st.sampled_from([RED[:-1], RED + "x", RED.upper(), f"{RED[:8]} {RED[8:]}", RED * 2]))
def test_no_other_text_is_a_token(known: Tokens, text: str) -> None:
    with pytest.raises(Unauthenticated):
        known.caller(bearer(text))


@given(st.text(max_size=20), st.text(max_size=20))
def test_names_of_two_tenants_never_meet(one: str, other: str) -> None:
    assert Caller("red").scoped(one) != Caller("blue").scoped(other)
    assert (Caller("red").scoped(one) == Caller("red").scoped(other)) == (one == other)


def test_what_a_client_shows_follows_its_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{RED}\n")
    own = OwnToken(ClientSecurity(token_file=file))
    assert own.metadata == (("authorization", f"Bearer {RED}"),)
    file.write_text(BLUE)
    assert own.metadata == (("authorization", f"Bearer {BLUE}"),)
    assert OwnToken(ClientSecurity()).metadata == ()
    file.write_text(f"red {RED}")
    with pytest.raises(StartupError, match="one token, and nothing else"):
        OwnToken(ClientSecurity(token_file=file))


def mixed(authority: Authority) -> tuple[Any, Any]:
    return authority.sign("one")[0], authority.sign("other")[1]


def encrypted(authority: Authority) -> tuple[Any, Any]:
    from cryptography.hazmat.primitives import serialization as pem

    certificate, key = authority.sign("one")
    private = pem.load_pem_private_key(key.read_bytes(), None)
    protection = pem.BestAvailableEncryption(b"secret")
    key.write_bytes(private.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, protection))
    return certificate, key


def garbage(authority: Authority) -> tuple[Any, Any]:
    authority.sign("one")[0].write_text("no certificate")
    return authority.folder / "one.pem", authority.folder / "one.key"


def missing(authority: Authority) -> tuple[Any, Any]:
    return authority.folder / "nowhere.pem", authority.sign("one")[1]


def expired(authority: Authority) -> tuple[Any, Any]:
    return authority.sign("one", **LONG_AGO)


def early(authority: Authority) -> tuple[Any, Any]:
    return authority.sign("one", not_before=datetime.now(UTC) + timedelta(days=1))


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (mixed, "belong together"),
        (encrypted, "without a passphrase"),
        (garbage, "belong together"),
        (missing, "^--tls-cert .*nowhere.pem: No such file"),
        (expired, "--tls-cert .*one.pem, --tls-key .*one.key: the certificate has expired, 2020-01-01"),
        (early, "is not valid before"),
    ],
)
def test_files_that_are_no_certificate_with_its_key_are_refused_at_the_start(
    files: Any, problem: str, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    certificate, key = files(authority)
    with pytest.raises(StartupError, match=problem):
        server_credentials(ServerSecurity(tls_cert=certificate, tls_key=key))
    with pytest.raises(StartupError, match=problem):
        channel_credentials(ClientSecurity(tls_ca=authority.file, tls_cert=certificate, tls_key=key))


def test_a_server_is_given_certificates_when_they_change_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC takes whatever it is given before a handshake for new, and drops what other handshakes may be using."""
    asked: list[Any] = []
    monkeypatch.setattr("grpc.dynamic_ssl_server_credentials", lambda first, ask, wanted: asked.append(ask))
    authority = Authority(tmp_path)
    certificate, key = authority.sign("one")
    server_credentials(ServerSecurity(tls_cert=certificate, tls_key=key))
    (ask,) = asked
    assert ask() is None and ask() is None
    authority.sign("one")
    assert ask() is not None and ask() is None


def test_an_expired_certificate_takes_no_valid_ones_place(tmp_path: Path, capsys: Any) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.sign("one")
    credentials = channel_credentials(ClientSecurity(tls_ca=authority.file, tls_cert=certificate, tls_key=key))
    assert credentials is not None
    valid = credentials.get()
    authority.sign("one", **LONG_AGO)
    assert [credentials.get() for _ in range(2)] == [valid] * 2
    assert capsys.readouterr().out.count("the certificate has expired") == 1
    authority.sign("one")
    assert credentials.get() is not valid


def test_a_process_that_is_started_again_takes_what_has_expired_meanwhile(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.sign("one", **LONG_AGO)
    assert server_credentials(ServerSecurity(tls_cert=certificate, tls_key=key), as_child=True)
    security = ClientSecurity(tls_ca=authority.file, tls_cert=certificate, tls_key=key)
    credentials = channel_credentials(security, as_child=True)
    assert credentials is not None
    expired = credentials.get()
    authority.sign("one")
    valid = credentials.get()
    authority.sign("one", **LONG_AGO)
    assert expired is not valid is credentials.get()


def test_certificates_that_have_expired_are_told_once(tmp_path: Path) -> None:
    """Of one's own the first of the chain counts, of authorities the last one: they are replaced with an overlap."""
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    old.sign("own", not_after=datetime(2031, 1, 1, tzinfo=UTC))
    files = {"tls_cert": tmp_path / "own.pem", "tls_key": tmp_path / "own.key", "tls_client_ca": tmp_path / "both"}
    files["tls_client_ca"].write_bytes(old.file.read_bytes() + new.file.read_bytes())
    (tmp_path / "none").write_text("no certificate")
    certificates = Certificates(SchedulerConfig(Path("m"), ("a:1",), **files, tls_ca=tmp_path / "none"))
    ends = certificates.ends()
    assert ends.keys() == {"--tls-cert", "--tls-client-ca"}
    assert ends["--tls-cert"] == datetime(2031, 1, 1, tzinfo=UTC)
    with structlog.testing.capture_logs() as logs:
        certificates.warn(datetime(2030, 12, 31, tzinfo=UTC))
        assert not logs
        for _ in range(2):
            certificates.warn(datetime(2031, 1, 2, tzinfo=UTC))
        (told,) = logs
        assert told["file"] == f"--tls-cert {tmp_path / 'own.pem'}" and told["expired"] == "2031-01-01 00:00 UTC"
        certificates.warn(ends["--tls-client-ca"])
        assert [entry["file"].split()[0] for entry in logs] == ["--tls-cert", "--tls-client-ca"]


@pytest.mark.parametrize(
    ("flag", "use"),
    [
        ("--tls-ca", lambda file: Dialer(ClientSecurity(tls_ca=file))),
        ("--token-file", lambda file: Dialer(ClientSecurity(token_file=file))),
        ("--token-file", Tokens),
        ("--tls-ca", lambda file: Dialer(scheduler(tls_ca=file).worker_security)),
        ("--worker-token-file", lambda file: Dialer(scheduler(worker_token_file=file).worker_security)),
        ("--peer-tls-ca", lambda file: Dialer(named(scheduler(peer_tls_ca=file).peer_security, "dns:///peers:1"))),
    ],
)
def test_a_file_that_is_not_there_or_empty_is_named_with_its_flag(flag: str, use: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    with pytest.raises(StartupError, match=f"^{flag} {file}: No such file"):
        use(file)
    file.touch()
    with pytest.raises(StartupError, match=f"^{flag} {file}: "):
        use(file)


def scheduler(**files: Path) -> SchedulerConfig:
    return SchedulerConfig(Path("m"), ("a:1",), **files)


def test_a_file_without_authorities_is_refused_at_the_start(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.sign("one")
    with pytest.raises(StartupError, match="no certificates of authorities"):
        channel_credentials(ClientSecurity(tls_ca=key))
    with pytest.raises(StartupError, match="no certificates of authorities"):
        server_credentials(ServerSecurity(tls_cert=certificate, tls_key=key, tls_client_ca=key))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: check_server(ServerSecurity(tls_cert="a")), "--tls-cert: needs --tls-key"),
        (lambda: check_server(ServerSecurity(tls_key="a")), "--tls-key: needs --tls-cert"),
        (lambda: check_server(ServerSecurity(tls_client_ca="a")), "--tls-client-ca: needs --tls-cert"),
        (lambda: ClientSecurity(tls_cert="a", tls_key="b"), "--tls-cert: needs --tls-ca"),
        (lambda: ClientSecurity(tls_ca="a", tls_key="b"), "--tls-key: needs --tls-cert"),
        (lambda: ClientSecurity(tls_server_name="a"), "--tls-server-name: needs --tls-ca"),
        (lambda: SchedulerConfig(Path("m"), ("a:1",), tls_key="b"), "--tls-key: needs --tls-cert"),
    ],
)
def test_flags_that_need_others_say_so(make: Any, problem: str) -> None:
    with pytest.raises(StartupError, match=problem):
        make()


def test_a_scheduler_shows_its_certificate_to_workers_only_in_tls() -> None:
    own: dict[str, Any] = {"tls_cert": "a", "tls_key": "b"}
    plain, dialed = (SchedulerConfig(Path("m"), ("a:1",), **own, tls_ca=ca).worker_security for ca in (None, "c"))
    assert plain == WorkerSecurity()
    assert dialed == WorkerSecurity(tls_ca="c", **own)


def test_settings_travel_to_other_processes_as_file_names_alone(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(RED)
    text = to_json(ClientSecurity(tls_ca=tmp_path / "ca", token_file=file))
    assert RED not in text
    assert from_json(ClientSecurity, text) == ClientSecurity(tls_ca=str(tmp_path / "ca"), token_file=str(file))
