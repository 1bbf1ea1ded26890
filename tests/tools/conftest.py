"""The client library's server, for the commands that talk to one."""

from tests.client.conftest import server
from tests.frontend.conftest import model, tokenizer

__all__ = ["model", "server", "tokenizer"]
