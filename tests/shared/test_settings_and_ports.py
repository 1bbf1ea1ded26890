"""Settings reach child processes unchanged; a busy port is told before a second server would share it."""

import socket
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.errors import StartupError
from shared.ports import address, find_free, require_free
from shared.settings import check_bounds, check_distinct, from_json, to_json


@dataclass(frozen=True)
class Settings:
    """Every kind of field that settings have."""

    folder: Path
    names: tuple[str, ...]
    maybe: Path | None = None
    count: int | None = None
    seconds: float = 1.5
    flag: bool = True


@pytest.mark.parametrize(
    "settings",
    [Settings(Path("/a b"), ("x:1", "y:2")), Settings(Path("."), (), Path("c"), 3, 0.25, False)],
)
def test_settings_survive_the_command_line(settings: Settings) -> None:
    assert from_json(Settings, to_json(settings)) == settings


def test_a_busy_port_is_told_even_where_the_other_shares_it() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(StartupError, match=str(port)):
            require_free("127.0.0.1", port)


def test_a_free_port_is_free() -> None:
    require_free("127.0.0.1", find_free("127.0.0.1"))


def test_an_ipv6_address_is_in_brackets() -> None:
    assert address("::1", 5) == "[::1]:5"
    assert address("127.0.0.1", 5) == "127.0.0.1:5"


def test_the_flag_that_is_wrong_is_named() -> None:
    with pytest.raises(StartupError, match="choose another --host"):
        require_free("192.0.2.1", 0)


@pytest.mark.parametrize(("count", "seconds"), [(0, 1.5), (5, 1.5), (1, float("nan"))])
def test_a_value_out_of_bounds(count: int, seconds: float) -> None:
    settings = Settings(Path("."), (), count=count, seconds=seconds)
    with pytest.raises(StartupError, match=r"^--(count|seconds) "):
        check_bounds(settings, ("count",), 1, 4)
        check_bounds(settings, ("seconds",), 0)


def test_values_within_bounds() -> None:
    check_bounds(Settings(Path("."), ()), ("count", "seconds"), 1, 4)


def test_ports_that_are_none_or_any_are_not_the_same() -> None:
    check_distinct({"--port": 0, "--health-port": None, "--metrics-port": 0, "--master-port": None})
