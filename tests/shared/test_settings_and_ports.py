"""Settings reach child processes unchanged; a busy port is told before a second server would share it."""

import socket
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.errors import StartupError
from shared.ports import find_free, require_free
from shared.settings import from_json, to_json


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
