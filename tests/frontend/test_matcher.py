"""Masks against brute force over the vocabulary; grammars against independent judges of what they stand for."""

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from scheduler_svc.frontend.constraint import MinTokens
from scheduler_svc.frontend.grammars import Grammar, grammar_of, structural_tag, tool_calls
from scheduler_svc.frontend.matcher import GrammarError, GrammarTokenizer, Mask, Matcher, compile_grammar
from scheduler_svc.frontend.vocabulary import Vocabulary
from shared.errors import InvalidRequest
from shared.pb import generation_pb2 as pb
from tandem.models import model_folder
from tests.frontend.model_folder import SPECIAL_TOKENS
from tests.frontend.naive_regex import NEVER, Expression, after, derivative, may_end, regexes

VOCABULARY_SIZE = 512
"""More than the tokenizer has tokens, as in Qwen's checkpoints."""


@pytest.fixture(scope="module")
def eos(tokenizer: Tokenizer) -> list[int]:
    return [tokenizer.token_to_id(SPECIAL_TOKENS[2]), tokenizer.token_to_id(SPECIAL_TOKENS[0])]


@pytest.fixture(scope="module")
def tokens(tokenizer: Tokenizer, eos: list[int]) -> GrammarTokenizer:
    return GrammarTokenizer(tokenizer, Vocabulary(tokenizer), VOCABULARY_SIZE, eos)


@pytest.fixture(scope="module")
def texts(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Bytes of every ordinary token, through the tokenizer's own decoder: single bytes by GPT-2's table of them."""
    special = set(range(tokenizer.get_vocab_size())) & {tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    alphabet = bytes_of_characters()
    found = {}
    for token_id in set(range(tokenizer.get_vocab_size())) - special:
        token = tokenizer.id_to_token(token_id)
        known = all(character in alphabet for character in token)
        found[token_id] = bytes(alphabet[character] for character in token) if known else token.encode()
    return found


def bytes_of_characters() -> dict[str, int]:
    """As transformers defines it for GPT-2."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def allowed(mask: Mask) -> set[int]:
    assert len(mask) == -(-VOCABULARY_SIZE // 8)
    return set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())


def compiled(tokens: GrammarTokenizer, kind: Any, text: str) -> Matcher:
    return compile_grammar(Grammar("constraint", kind, text), tokens)


@settings(max_examples=150, deadline=None)
@given(regex=regexes(), seed=st.integers(0, 1 << 32))
def test_a_mask_is_what_brute_force_over_the_vocabulary_finds(
    regex: tuple[str, Expression],
    seed: int,
    tokens: GrammarTokenizer,
    texts: dict[int, bytes],
    eos: list[int],
) -> None:
    """Along a random walk. Where the next byte is forced the mask may keep to the usual tokens of what is forced."""
    pattern, expected = regex
    matcher, chosen = compiled(tokens, "regex", pattern), random.Random(seed)
    for _ in range(12):
        found = allowed(matcher.allowed())
        possible = {token for token, text in texts.items() if text and after(expected, text) != NEVER}
        if may_end(expected):
            possible.update(eos)
        ways = may_end(expected) + sum(derivative(expected, byte) != NEVER for byte in range(256))
        assert found == possible if ways > 1 else found and found <= possible, pattern
        token = chosen.choice(sorted(found))
        if token in eos:
            break
        matcher.consume(token)
        expected = after(expected, texts[token])


def test_what_is_forced_comes_in_the_tokens_of_the_text(tokens: GrammarTokenizer, tokenizer: Tokenizer) -> None:
    text = "She sells <think> sea shells 日本語"
    matcher, usual = compiled(tokens, "ebnf", f'start: "{text}"'), tokenizer.encode(text).ids
    for token in usual:
        assert token in allowed(matcher.allowed())
        matcher.consume(token)


@pytest.mark.parametrize("text", ["<|im_end|>", "a<|endoftext|>b"])
def test_text_that_reads_like_a_special_token_is_text(
    text: str, tokens: GrammarTokenizer, texts: dict[int, bytes], eos: list[int]
) -> None:
    matcher, output = compiled(tokens, "ebnf", f'start: "{text}"'), b""
    while output != text.encode():
        token = min(allowed(matcher.allowed()))
        output += texts[token]
        matcher.consume(token)
    assert allowed(matcher.allowed()) == set(eos)


def test_any_token_is_any_token_that_the_tokenizer_has(tokens: GrammarTokenizer, tokenizer: Tokenizer) -> None:
    """Ids up to the model's vocabulary size, without a token, are padding."""
    assert max(allowed(compiled(tokens, "ebnf", "start: <[*]>").allowed())) < tokenizer.get_vocab_size()


def test_ends_may_be_ids_without_a_token_but_there_must_be_some(tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary(tokenizer)
    beyond = compiled(GrammarTokenizer(tokenizer, vocabulary, VOCABULARY_SIZE, [500]), "regex", "a?")
    assert 500 in allowed(beyond.allowed())
    with pytest.raises(GrammarError, match="no end-of-sequence token"):
        compiled(GrammarTokenizer(tokenizer, vocabulary, VOCABULARY_SIZE, []), "regex", "a")


def test_copies_go_their_own_ways(tokens: GrammarTokenizer, tokenizer: Tokenizer) -> None:
    one = compiled(tokens, "regex", "(ab|ba)c")
    other = one.copy()
    a, b = tokenizer.token_to_id("a"), tokenizer.token_to_id("b")
    one.consume(a)
    other.consume(b)
    assert b in allowed(one.allowed()) and a not in allowed(one.allowed())
    assert a in allowed(other.allowed()) and b not in allowed(other.allowed())


def walk(matcher: Matcher, texts: dict[int, bytes], eos: list[int], seed: int, most: int = 400) -> str | None:
    """A random output, or None where it did not end. Short tokens and ends are preferred, or it never would."""
    chosen, output = random.Random(seed), b""
    for _ in range(most):
        found = allowed(matcher.allowed())
        if found & set(eos):
            return output.decode()
        token = min(
            chosen.sample(sorted(found), min(len(found), 3)), key=lambda t: (b'"' not in texts[t], len(texts[t]))
        )
        output += texts[token]
        matcher.consume(token)
    return None


SCALARS = st.sampled_from(
    [
        {"type": "integer", "minimum": -5, "maximum": 17},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 2},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": 4},
        {"type": "string", "pattern": "^[a-c]{2,3}$"},
        {"enum": ["red", 3, None, {"a": [1]}]},
        {"const": 'a"b\\\n日'},
        {"type": ["string", "integer"], "maxLength": 2},
    ]
)
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: (
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3))
        | st.builds(
            lambda items: {"type": "array", "prefixItems": items, "items": False},
            st.lists(inner, min_size=1, max_size=3),
        )
        | st.builds(
            lambda fields, required: {
                "type": "object",
                "properties": fields,
                "required": sorted(fields)[:required],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["a", "b c", "größe", 'q"']), inner, max_size=3),
            st.integers(0, 3),
        )
        | st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner)
    ),
    max_leaves=5,
)


@settings(max_examples=120, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 1 << 32))
def test_what_a_schema_lets_through_validates(
    schema: dict[str, Any], seed: int, tokens: GrammarTokenizer, texts: dict[int, bytes], eos: list[int]
) -> None:
    output = walk(compiled(tokens, "json_schema", json.dumps(schema)), texts, eos, seed)
    if output is not None:
        jsonschema.validate(json.loads(output), schema)


@settings(max_examples=60, deadline=None)
@given(schema=SCHEMAS, value=st.data())
def test_what_validates_is_let_through(
    schema: dict[str, Any], value: Any, tokens: GrammarTokenizer, tokenizer: Tokenizer
) -> None:
    """Some values are written down; each that the schema accepts can be put out, compact or indented."""
    simple = [0, 17, 1.5, True, None, "", "ab", "red", {"a": [1]}, [], [True], [0, "ab"], {}, {"a": "ab", "b c": 3}]
    written = value.draw(st.sampled_from(simple))
    valid = jsonschema.Draft202012Validator(schema).is_valid(written)
    for text in (json.dumps(written, separators=(",", ":")), json.dumps(written, indent=2), json.dumps(written)):
        assert accepts(compiled(tokens, "json_schema", json.dumps(schema)), tokenizer, text) == valid, (schema, text)


def accepts(matcher: Matcher, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the text is a whole output."""
    try:
        for token in tokenizer.encode(text).ids:
            matcher.consume(token)
        matcher.consume(tokenizer.token_to_id("<|im_end|>"))
    except GrammarError:
        return False
    return True


def test_white_space_is_bounded(tokens: GrammarTokenizer, tokenizer: Tokenizer) -> None:
    """A model that is unsure would put it out until its limit."""
    for text, good in (('{ "a": 1 }', True), ('{\n    "a": 1}', True), ('{  "a": 1}', False), ('{\n\n"a": 1}', False)):
        assert accepts(compiled(tokens, "json_schema", '{"type": "object"}'), tokenizer, text) is good, text
    free = '{"type": "object", "x-guidance": {"whitespace_pattern": "[ ]*"}}'
    assert accepts(compiled(tokens, "json_schema", free), tokenizer, '{     "a": 1}')


SUMS = {
    "lark": 'start: sum\nsum: term ("+" term)*\nterm: /[0-9]+/ | "(" sum ")"',
    "ebnf": 'root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"',
}


@pytest.mark.parametrize("text", ["1", "12+(3+4)", "((7))+1", "", "(1", "1+", "()", "1)", "+1", "(1)+((2+3)+45)"])
@pytest.mark.parametrize("dialect", SUMS)
def test_sums(dialect: str, text: str, tokens: GrammarTokenizer, tokenizer: Tokenizer) -> None:
    assert accepts(compiled(tokens, "ebnf", SUMS[dialect]), tokenizer, text) == is_sum(text)


def is_sum(text: str) -> bool:
    """Sums inside parentheses are replaced by a number, innermost first, until none is left."""
    before = ""
    while before != text:
        before, text = text, re.sub(r"\([0-9]+(\+[0-9]+)*\)", "0", text)
    return re.fullmatch(r"[0-9]+(\+[0-9]+)*", text) is not None


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"name": 'the "time"'},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "the \\"time\\"", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("grammar", "text", "good"),
    [
        (tool_calls(TOOLS), CALL, True),
        (tool_calls(TOOLS), f"{CALL}\n{TIME}\n{CALL}", True),
        (tool_calls(TOOLS, parallel=False), f"{CALL}\n{TIME}", False),
        (tool_calls(TOOLS, "get_weather"), CALL, True),
        (tool_calls(TOOLS, "get_weather"), TIME, False),
        (tool_calls(TOOLS), CALL.replace('"city": "Köln", ', ""), False),
        (tool_calls(TOOLS), TIME.replace("{}", '{"zone": 1}'), False),
        (tool_calls(TOOLS), f"Well: {CALL}", False),
        (tool_calls(TOOLS), "", False),
    ],
)
def test_tool_calls(grammar: Grammar, text: str, good: bool, tokens: GrammarTokenizer, tokenizer: Tokenizer) -> None:
    assert accepts(compile_grammar(grammar, tokens), tokenizer, text) is good


@pytest.mark.parametrize(
    ("text", "good"),
    [("no tag at all <f", True), ("now <f=a>12</f>, then <f=b>true done", True), ("<f=c>1", False), ("<f=a>x", False)],
)
def test_structural_tags(text: str, good: bool, tokens: GrammarTokenizer, tokenizer: Tokenizer) -> None:
    structures = [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": ""},
    ]
    grammar = structural_tag(json.dumps({"structures": structures, "triggers": ["<f="]}))
    assert accepts(compile_grammar(grammar, tokens), tokenizer, text) is good


def test_a_choice_is_one_of_its_texts(tokens: GrammarTokenizer, tokenizer: Tokenizer) -> None:
    choices = ["yes", "yes, please", "日本語", 'a "b"\n\\', *map(str, range(4000))]
    grammar = grammar_of(pb.Constraint(choice=pb.Choice(choices=choices)), [])
    matcher = compile_grammar(grammar, tokens)
    for text in ("yes", "yes, please", "日本語", 'a "b"\n\\', "3999", "no", "yes,", "4000", ""):
        assert accepts(matcher.copy(), tokenizer, text) == (text in choices), text


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("regex", "(a", "unclosed group"),
        ("regex", r"(a)\1", "backreferences"),
        ("ebnf", "start: nothing", 'unknown name: "nothing"'),
        ("ebnf", "root ::= nothing", "Rule 'nothing' not found"),
        ("ebnf", 'root ::= "', "Lark"),
        ("json_schema", '{"type": ', "not JSON: Expecting value: line 1 column 10"),
        ("json_schema", "3", "object or boolean"),
        ("json_schema", '{"type": "text"}', "Invalid type: text"),
        ("json_schema", '{"not": {}}', 'Unimplemented keys: ["not"]'),
        ("json_schema", '{"$ref": "http://127.0.0.1:1/schema"}', "does not fetch"),
        ("json_schema", "[" * 100_000, "recursion"),
        # What accepts nothing at all.
        ("regex", r"a[^\s\S]", "no text is left"),
        ("ebnf", "start: x\nx: x", "no text is left"),
        ("json_schema", '{"enum": []}', "Unsatisfiable"),
        ("json_schema", "false", "Unsatisfiable"),
    ],
)
def test_a_bad_grammar_is_told_with_the_parser_s_words(
    kind: Any, text: str, told: str, tokens: GrammarTokenizer
) -> None:
    with pytest.raises(GrammarError) as error:
        compiled(tokens, kind, text)
    assert told in str(error.value) and "<non-verbose/>" not in str(error.value)
    assert len(str(error.value)) < 1100


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("(a", "at character 1: unclosed group\n    (a\n    ^"),
        (r"/\/é/\d(", "at character 8: unclosed group\n    /\\/é/\\d(\n           ^"),
        (
            "(?P<n>a)\n(?P<n>b)",
            f"at character 14: duplicate capture group name\n    (?P<n>a)?(?P<n>b)\n    {' ' * 13}^",
        ),
        (f"{'a' * 1000}[{'b' * 1000}", f"at character 1001: unclosed character class\n    {'a' * 30}["),
        (r"\b", "lookarounds not supported yet"),
    ],
)
def test_a_bad_expression_is_told_in_the_caller_s_own_text(text: str, told: str, tokens: GrammarTokenizer) -> None:
    """Not in that of the grammar that is made of it."""
    with pytest.raises(GrammarError) as error:
        compiled(tokens, "regex", text)
    assert str(error.value).startswith(told) and "start:" not in str(error.value)


def test_a_bad_schema_within_a_grammar_is_told_by_its_place_in_the_request(tokens: GrammarTokenizer) -> None:
    bad = {"type": "object", "properties": {"x": {"type": "strin"}}}
    tools = [{"function": {"name": "good"}}, {"function": {"name": "bad", "parameters": bad}}]
    tags = {"structures": [{"begin": "<a>", "schema": bad, "end": "</a>"}], "triggers": ["<"]}
    for grammar, told in (
        (tool_calls(tools), "chat.tools_json[1].parameters: Invalid type: strin"),
        (tool_calls(tools, "bad"), "chat.tools_json[1].parameters: Invalid type: strin"),
        (structural_tag(json.dumps(tags)), "structures[0].schema: Invalid type: strin"),
    ):
        with pytest.raises(GrammarError) as error:
            compile_grammar(grammar, tokens)
        assert str(error.value) == told


def test_a_grammar_may_lead_nowhere(tokens: GrammarTokenizer, tokenizer: Tokenizer) -> None:
    matcher = compiled(tokens, "ebnf", 'start: "a" NEVER\nNEVER: /[^\\s\\S]/')
    matcher.consume(tokenizer.token_to_id("a"))
    with pytest.raises(GrammarError, match="no text is left"):
        matcher.allowed()


def test_ends_wait_for_min_tokens_unless_nothing_else_is_left() -> None:
    rule, full = MinTokens.of(2, [3, 500], VOCABULARY_SIZE), np.full(64, 255, dtype=np.uint8)
    assert allowed(rule.applied(full, 1)) == set(range(512)) - {3, 500}
    assert allowed(rule.applied(full, 2)) == set(range(512))
    only = MinTokens.of(0, [500], VOCABULARY_SIZE).stops
    assert allowed(rule.applied(only, 0)) == {500}


@pytest.mark.parametrize(
    ("constraint", "told"),
    [
        (pb.Constraint(), "constraint: one of json_schema, json_object, regex, grammar"),
        (pb.Constraint(json_object=False), "constraint.json_object: must be true"),
        (pb.Constraint(choice=pb.Choice()), "constraint.choice.choices: has 0 texts; 1 to 4096"),
        (pb.Constraint(choice=pb.Choice(choices=["a", ""])), r"constraint.choice.choices\[1\]: must not be empty"),
        (pb.Constraint(regex="a" * 262_145), "constraint.regex: has 262145 bytes; 1 to 262144"),
        (pb.Constraint(regex=""), "constraint.regex: has 0 bytes"),
        (pb.Constraint(structural_tag="{}"), "constraint.structural_tag: must be JSON with structures"),
        (
            pb.Constraint(
                structural_tag='{"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["b"]}'
            ),
            r"structures\[0\].begin: 'a' begins with none of the triggers",
        ),
        (pb.Constraint(tool_choice=pb.ToolChoice(function="x")), "tool_choice.function: 'x' is not the name of a tool"),
    ],
)
def test_a_refusal_names_field_and_bound(constraint: pb.Constraint, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        grammar_of(constraint, TOOLS)


def test_tools_without_which_there_is_nothing_to_choose() -> None:
    with pytest.raises(InvalidRequest, match="has no tool to call"):
        tool_calls([])
    with pytest.raises(InvalidRequest, match=r"chat.tools_json\[1\]: has no function with a name"):
        tool_calls([{"name": "a"}, {"type": "function"}])


def test_the_packaged_model_s_tokenizer(tmp_path: Path) -> None:
    """Nothing is special about the tests' own."""
    tokenizer = Tokenizer.from_file(str(model_folder("tiny") / "tokenizer.json"))
    tokens = GrammarTokenizer(tokenizer, Vocabulary(tokenizer), 1536, [tokenizer.token_to_id("<|im_end|>")])
    assert accepts(compile_grammar(Grammar("constraint", "regex", "Eliza(beth)?"), tokens), tokenizer, "Elizabeth")
