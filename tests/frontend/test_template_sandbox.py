"""What a hostile chat template can't do: reach what it was not given, or take more time and memory than it may."""

import tracemalloc
from typing import Any

import pytest

from scheduler_svc.frontend.chat_template import ChatTemplate
from shared.errors import InvalidRequest

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hello\n" * 100}]
MOST_BYTES = 10_000
MOST_MEMORY = 16 << 20
"""Bytes, of Python's objects, in tests whose budget is 160,000 characters."""


def render(source: str, **variables: Any) -> str:
    return ChatTemplate({"default": source}, {}).render(MESSAGES, None, True, variables, 0.2, MOST_BYTES)


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__ }}",
    "{{ messages|attr('__class__')|attr('__base__') }}",
    "{{ (messages|map(attribute='__class__')|first).__base__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ joiner.__init__.__globals__['os'].popen('id').read() }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ strftime_now.__globals__['Path']('/etc/passwd').read_text() }}",
    "{{ _tick.__globals__['budget'].get() }}",
    "{{ self._TemplateReference__context.environment.loader }}",
    "{{ '{0.__class__.__base__}'.format(1).x }}",
    "{{ '{0.__class__}'.format_map({'0': 1}).x.y }}",
    "{{ (messages|tojson).format.__self__.__class__.x }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('id') }}",
    "{% extends '/etc/passwd' %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ config.items() }}",
    "{{ request.application.__globals__ }}",
]

BOMBS = [
    "{{ 'x' * 1000000000 }}",
    "{% set x = 1000000000 * 'x' %}{{ x|length }}",
    "{% set x = [0] * 1000000000 %}",
    "{% set x = 10 ** 1000000000 %}",
    "{% set ns = namespace(x=10) %}{% for i in range(40) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set ns = namespace(x='xx') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='xx') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set x = 'xx' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 40,
    "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set x = 'xx' %}" + "{% set x = f(x) %}" * 40,
    "{{ 'x'|center(1000000000) }}",
    "{{ 'x'.ljust(1000000000) }}",
    "{{ 'x'.zfill(1000000000) }}",
    "{{ 'x\tx'.expandtabs(1000000000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ messages[0].content|replace('l', 'x' * 100000) }}",
    "{{ messages[0].content.replace('l', 'x' * 100000) }}",
    "{{ 'xxxx'.translate({120: 'x' * 100000}) }}",
    "{{ ('x' * 100000).join(['a'] * 10000) }}",
    "{{ range(10000)|join('x' * 100000) }}",
    "{{ messages[0].content|indent(1000000) }}",
    "{{ messages|tojson(indent=1000000000) }}",
    "{{ messages|tojson(separators=('x' * 100000, ':')) }}",
    "{{ strftime_now('%c' * 1000000) }}",
    "{{ range(99999)|map('center', 100000)|list|length }}",
    "{{ range(10000000) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ messages }}{% endfor %}",
    "{% macro f(x) %}{{ f(x) ~ f(x) }}{% endmacro %}{{ f(1) }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_reaches_nothing_that_it_was_not_given(source: str) -> None:
    try:
        assert not render(source), "what is not there is nothing"
    except InvalidRequest as error:
        assert "the model's chat template refuses it" in str(error)
    assert MESSAGES == [{"role": "user", "content": "hello\n" * 100}]


@pytest.mark.parametrize("source", BOMBS)
def test_a_template_takes_no_more_memory_than_it_may(source: str) -> None:
    """Time is bounded with it: what is refused before it is made takes none."""
    render("{{ 1 }}")
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="chat: "):
            render(source)
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["lipsum", "'x'|wordwrap(1)"])
def test_what_no_prompt_needs_is_not_there(name: str) -> None:
    with pytest.raises(Exception, match=r"No filter named|undefined"):
        render(f"{{{{ {name} }}}}{{{{ {name}() }}}}")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ '{{\"a\": {}}}'.format(20240131) }}", '{"a": 20240131}'),
        ("{{ '%s is %05.1f%%' % ('x', 2.5) }} {{ '** %s **' % 20240131 }}", "x is 002.5% ** 20240131 **"),
        ("{{ '%s-%s'|format('a', 1) }}{{ 'a' ~ 1 ~ none }}", "a-1a1None"),
        ("{{ [1, 2]|join(', ') }}{{ 'a,b'.split(',') | join('|') }}{{ '-'.join(['a', 'b']) }}", "1, 2a|ba-b"),
        ("{{ 'aXb'|replace('X', '-') }}{{ 'aXb'.replace('X', '-', 1) }}", "a-ba-b"),
        ("{{ 'a\nb'|indent(2) }}{{ {'a': [1]}|tojson(indent=2) }}", 'a\n  b{\n  "a": [\n    1\n  ]\n}'),
        ("{{ 1.5 * 2 }}{{ 3 * 'a' }}{{ 2 ** 0.5 > 1 }}{{ 2 * 3 + 1 }}{{ -1 * 'a' }}", "3.0aaaTrue7"),
        ("{{ 2 ** 10 }}{{ 7 % 3 }}{{ [1] + [2] }}{{ 'ab' * 2 }}{{ 'x'|default(20240131) }}", "10241[1, 2]ababx"),
        ("{{ messages|map(attribute='role')|list }}{{ messages|length }}", "['user']1"),
    ],
)
def test_what_templates_do_stays_as_it_is(source: str, expected: str) -> None:
    assert render(source) == expected


def test_a_client_that_sends_a_template_sends_text() -> None:
    attack = "{{ ''.__class__ }}{% for i in range(99999) %}x{% endfor %}"
    assert render("{{ extra }}", extra=attack) == attack
