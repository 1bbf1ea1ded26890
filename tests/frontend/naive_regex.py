"""Regular expressions over bytes by Brzozowski's derivatives (1964): slow, short, and an oracle for token masks.

An expression is NEVER, EMPTY or a tuple: ("bytes", set), ("then", first, second), ("or", set of two and more), ("star",
inner). The constructors keep NEVER out of all others, so an expression that is not NEVER matches something, and each
alternative once, in no order: without that stars in stars have derivatives without end (Brzozowski's similarity).
"""

from functools import cache, reduce
from typing import Any, TypeAlias

from hypothesis import strategies as st

Expression: TypeAlias = tuple[Any, ...]

NEVER: Expression = ("never",)
EMPTY: Expression = ("empty",)


def then(first: Expression, second: Expression) -> Expression:
    if NEVER in (first, second):
        return NEVER
    return second if first == EMPTY else first if second == EMPTY else ("then", first, second)


def either(one: Expression, other: Expression) -> Expression:
    alternatives = _alternatives(one) | _alternatives(other)
    if len(alternatives) < 2:
        return next(iter(alternatives), NEVER)
    return ("or", alternatives)


def _alternatives(expression: Expression) -> frozenset[Expression]:
    if expression == NEVER:
        return frozenset()
    return expression[1] if expression[0] == "or" else frozenset({expression})


def literal(text: str) -> Expression:
    expression = EMPTY
    for byte in reversed(text.encode()):
        expression = then(("bytes", frozenset({byte})), expression)
    return expression


@cache
def may_end(expression: Expression) -> bool:
    """Whether it matches the empty text."""
    match expression:
        case ("empty",) | ("star", _):
            return True
        case ("then", first, second):
            return may_end(first) and may_end(second)
        case ("or", alternatives):
            return any(map(may_end, alternatives))
    return False


@cache
def derivative(expression: Expression, byte: int) -> Expression:
    """What must follow where this byte has come first."""
    match expression:
        case ("bytes", allowed):
            return EMPTY if byte in allowed else NEVER
        case ("then", first, second):
            here = then(derivative(first, byte), second)
            return either(here, derivative(second, byte)) if may_end(first) else here
        case ("or", alternatives):
            return reduce(either, (derivative(one, byte) for one in alternatives), NEVER)
        case ("star", inner):
            return then(derivative(inner, byte), expression)
    return NEVER


def after(expression: Expression, text: bytes) -> Expression:
    for byte in text:
        expression = derivative(expression, byte)
    return expression


def _pair(make: Any, pattern: str) -> Any:
    return lambda two: (pattern.format(two[0][0], two[1][0]), make(two[0][1], two[1][1]))


def regexes() -> st.SearchStrategy[tuple[str, Expression]]:
    """Patterns and what they mean: letters that tokens have in common, characters of several bytes, a line break."""
    leaves = st.sampled_from(["a", "b", "s", "sh", "el", " ", "é", "日", "🙂", "\n"]).map(lambda t: (t, literal(t)))
    letters = st.just(("[a-z]", ("bytes", frozenset(range(ord("a"), ord("z") + 1)))))
    return st.recursive(
        leaves | letters,
        lambda inner: (
            st.tuples(inner, inner).map(_pair(then, "(?:{}{})"))
            | st.tuples(inner, inner).map(_pair(either, "(?:{}|{})"))
            | inner.map(lambda one: (f"(?:{one[0]})*", ("star", one[1])))
            | inner.map(lambda one: (f"(?:{one[0]})?", either(EMPTY, one[1])))
        ),
        max_leaves=8,
    )
