"""Fixtures of the frontend's tests."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.frontend.model_folder import make_model_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that no test changes."""
    return make_model_folder(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Tokenizer:
    """The model's tokenizer: the oracle of texts and ids."""
    return Tokenizer.from_file(str(model / "tokenizer.json"))
