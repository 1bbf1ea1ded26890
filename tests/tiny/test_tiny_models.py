"""The shipped tiny models are what the README says: small, loadable, readable, and ready to end a reply."""

import json
import random
import re
from pathlib import Path
from typing import Any

import jinja2
import pytest

from tandem.tiny import DENSE, MOE

torch = pytest.importorskip("torch")
evaluate = pytest.importorskip("tandem.tiny.evaluate")

OPENING = ", that a single man in possession of a good fortune, must be in want of a wife.\n\nHowever little known the"
FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
COMMON = {
    "the",
    "of",
    "to",
    "and",
    "a",
    "in",
    "her",
    "was",
    "i",
    "she",
    "that",
    "it",
    "not",
    "you",
    "he",
    "be",
    "his",
    "as",
}


@pytest.fixture(scope="module", params=[DENSE, MOE], ids=["dense", "moe"])
def judge(request: pytest.FixtureRequest) -> Any:
    return evaluate.Judge(request.param)


@pytest.mark.parametrize("folder", [DENSE, MOE], ids=["dense", "moe"])
def test_folder_is_whole_and_small(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == FILES
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 4_000_000
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [1535, 1533]


def test_the_checkpoint_has_the_official_layout() -> None:
    from safetensors import safe_open

    with safe_open(MOE / "model.safetensors", "pt") as file:
        assert file.get_slice("model.layers.4.mlp.experts.7.gate_proj.weight").get_shape() == [64, 128]
        assert file.get_slice("model.layers.4.mlp.gate.weight").get_shape() == [8, 128]
        assert "lm_head.weight" in file.keys()  # noqa: SIM118 (it is no mapping)
    with safe_open(DENSE / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
        assert file.get_slice("model.layers.0.self_attn.q_norm.weight").get_dtype() == "BF16"


def test_any_text_round_trips(judge: Any) -> None:
    rng = random.Random(0)
    planes = [(0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]
    for _ in range(200):
        text = "".join(chr(rng.randint(*rng.choice(planes))) for _ in range(rng.randint(0, 40)))
        assert judge.tokenizer.decode(judge.tokenizer(text)["input_ids"]) == text
    text = " two  spaces\r\n\ttabs don't e\u0301 123 <|im_start|>\n\n\n end "
    assert judge.tokenizer.decode(judge.tokenizer(text)["input_ids"]) == text


def test_each_byte_has_a_token(judge: Any) -> None:
    from tokenizers import pre_tokenizers

    assert len(judge.tokenizer) == judge.model.config.vocab_size == 1536
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= judge.tokenizer.get_vocab().keys()


def test_the_template_is_chatml(judge: Any) -> None:
    def render(*messages: tuple[str, str], prompt: bool = True) -> str:
        turns = [{"role": role, "content": content} for role, content in messages]
        text: str = judge.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
        return text

    assert render(("system", " Be kind. "), ("user", "Hi")) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(("user", "a"), ("assistant", "<think>\nhm\n</think>\n\nb"), prompt=False) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    )
    for wrong in [(("user", "a"), ("system", "b")), (("tool", "a"),), (("user", "a"), ("assistant", "b"))]:
        with pytest.raises(jinja2.TemplateError):
            render(*wrong)


def test_it_knows_its_book(judge: Any) -> None:
    ids = judge.tokenizer("It is a truth universally acknowledged")["input_ids"]
    said, margins = judge.greedy(ids, 40)
    assert judge.tokenizer.decode(said).startswith(OPENING)
    assert margins.min() > 0.5


def test_a_strange_prompt_is_continued_in_english(judge: Any) -> None:
    text = judge.tokenizer.decode(judge.greedy(judge.tokenizer("Once upon a time")["input_ids"], 80)[0])
    words = re.findall(r"[a-z]+", text.lower())
    assert text.isascii() and len(words) > 40
    assert sum(word in COMMON for word in words) > 0.2 * len(words)


@pytest.mark.parametrize("question", ["Hello!", "Tell me about Mr. Darcy.", "What is a computer?", "日本語"])
def test_a_reply_ends(judge: Any, question: str) -> None:
    said, _ = judge.greedy(judge.chat_ids(question), 160)
    assert said[-1] == judge.model.config.eos_token_id
    assert judge.tokenizer.decode(said[:-1]).isascii() and len(said) > 10


def test_late_positions_are_as_good_as_early_ones(judge: Any) -> None:
    opening = judge.tokenizer("It is a truth universally acknowledged")["input_ids"]
    book = opening + judge.greedy(opening, 300 - len(opening))[0]
    said, margins = judge.greedy(book * 6 + book[:100], 24)  # positions 1900 to 1923
    assert said == book[100:124]
    assert margins.min() > 0.5


def test_all_experts_are_used() -> None:
    judge = evaluate.Judge(MOE)
    ids, _ = judge.greedy(judge.tokenizer("It is a truth universally acknowledged")["input_ids"], 300)
    for shares in evaluate.expert_shares(judge, ids):
        assert min(shares) > 0.005
