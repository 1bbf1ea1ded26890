"""The detokenizer against tokenizer.decode and a naive search: any ids, any stop strings, at every moment."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from scheduler_svc.frontend.detokenizer import Detokenizer
from scheduler_svc.frontend.stop_strings import StopStrings
from scheduler_svc.frontend.vocabulary import Vocabulary
from shared.errors import StartupError
from tests.frontend.model_folder import make_tokenizer

_TOKENIZER = make_tokenizer()
_VOCABULARY = Vocabulary(_TOKENIZER)


def _id(token: str) -> int:
    token_id = _TOKENIZER.token_to_id(token)
    assert token_id is not None
    return int(token_id)


_BYTE_IDS = [_id(character) for character in "ðŁĻĤâĤ¬Ã¤a"]
"""Bytes of an emoji, a euro sign and an umlaut: drawn at random they make every kind of broken UTF-8."""

any_ids = st.lists(st.one_of(st.integers(0, 511), st.sampled_from(_BYTE_IDS)), max_size=40)
texts = st.text(st.one_of(st.sampled_from("aben .\n€🙂日"), st.characters(codec="utf-8", exclude_characters="�")))


def _detokenizer(*stops: str, min_tokens: int = 0) -> Detokenizer:
    return Detokenizer(_VOCABULARY, StopStrings.build(stops), min_tokens)


def _decode(ids: list[int]) -> str:
    text: str = _TOKENIZER.decode(ids)
    return text


@given(any_ids)
@settings(max_examples=300)
def test_what_is_given_out_is_always_the_decoding_of_the_ids_given_out(output: list[int]) -> None:
    detokenizer, text, ids = _detokenizer(), "", list[int]()
    for token in output:
        assert detokenizer.push(token) is None
        more, more_ids = detokenizer.take()
        text, ids = text + more, ids + more_ids
        assert text == _decode(ids)
    detokenizer.flush()
    more, more_ids = detokenizer.take()
    assert ids + more_ids == output
    assert text + more == _decode(output)


@given(texts)
def test_no_replacement_character_for_a_character_split_over_tokens(text: str) -> None:
    detokenizer = _detokenizer()
    for token in _TOKENIZER.encode(text).ids:
        detokenizer.push(token)
        assert "�" not in detokenizer.take()[0]


def _naive_stop(output: list[int], stops: list[str], min_tokens: int) -> tuple[str, int, str] | None:
    """(text, tokens, stop) by trying every prefix, character by character."""
    seen = 0
    for count in range(1, len(output) + 1):
        text = _decode(output[:count]).rstrip("�")
        for end in range(seen + 1, len(text) + 1):
            found = [stop for stop in stops if text[:end].endswith(stop)]
            if found and count >= min_tokens:
                longest = max(found, key=len)
                return text[: end - len(longest)], count, longest
        seen = len(text)
    return None


@given(st.text("ab \n€", max_size=40), st.lists(st.text("ab €", min_size=1, max_size=4), max_size=4), st.integers(0, 6))
@settings(max_examples=400)
def test_stop_strings_are_found_as_a_naive_search_finds_them(text: str, stops: list[str], min_tokens: int) -> None:
    output = _TOKENIZER.encode(text).ids
    detokenizer = _detokenizer(*stops, min_tokens=min_tokens)
    count, stop = 0, None
    for count, token in enumerate(output, 1):  # noqa: B007 - used after the loop
        stop = detokenizer.push(token)
        if stop is not None:
            break
    detokenizer.flush()
    shown, ids = detokenizer.take()
    expected = _naive_stop(output, stops, min_tokens) or (text, count, None)
    assert (shown, len(ids), stop) == expected


@given(st.text("ab€🙂", max_size=20), st.integers(0, 30), st.sampled_from(["ab", "b€a", "🙂🙂", "zz"]))
def test_resuming_goes_on_as_the_undisturbed_stream_does(text: str, given_out: int, stop: str) -> None:
    """A client resumes with the ids that it got, whenever it got them."""
    output = _TOKENIZER.encode(text).ids
    whole = _detokenizer(stop)
    ids_before: list[int] = []
    text_after, ids_after = "", list[int]()
    resumed = None
    for count, token in enumerate(output):
        if count == given_out:
            resumed = _detokenizer(stop)
            assert resumed.skip(ids_before) is None
            for held in output[len(ids_before) : count]:
                assert resumed.push(held) is None
        ended = whole.push(token)
        text, ids = whole.take()
        if resumed is None:
            ids_before = ids_before + ids
        else:
            assert resumed.push(token) == ended
            text_after, ids_after = text_after + text, ids_after + ids
        if ended:
            break
    if resumed is not None:
        assert resumed.take() == (text_after, ids_after)


def test_text_is_not_held_back_longer_than_it_could_become_a_stop_string() -> None:
    a, b, c = (_id(character) for character in "abc")
    detokenizer = _detokenizer("abc")
    detokenizer.push(c)
    assert detokenizer.take() == ("c", [c])
    detokenizer.push(a)
    detokenizer.push(b)
    assert detokenizer.take() == ("", [])
    detokenizer.push(a)
    assert detokenizer.take() == ("ab", [a, b])
    detokenizer.flush()
    assert detokenizer.take() == ("a", [a])


def test_special_tokens_are_ids_without_text_and_added_ordinary_tokens_are_shown() -> None:
    end, think = _id("<|im_end|>"), _id("<think>")
    detokenizer = _detokenizer()
    for token in (end, think, 511):
        detokenizer.push(token)
    assert detokenizer.take() == ("<think>", [end, think, 511])


def test_the_token_that_stopped_a_sample_has_no_text() -> None:
    a, b = (_id(character) for character in "ab")
    detokenizer = _detokenizer()
    detokenizer.push(a)
    detokenizer.push_stop(b)
    detokenizer.flush()
    assert detokenizer.take() == ("a", [a, b])


def test_a_tokenizer_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(StartupError, match="ByteLevel"):
        Vocabulary(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))


def test_every_entry_of_the_vocabulary_is_its_own_decoding(model: Path, tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary(tokenizer)
    for token in range(tokenizer.get_vocab_size()):
        assert vocabulary.text_bytes(token).decode(errors="replace") == tokenizer.decode([token])
