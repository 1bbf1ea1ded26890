"""What llguidance says of a grammar, in terms of what the caller wrote. Decides nothing about grammars.

It quotes the text that it was given, which may have been made of the caller's: then the caller's own words and place
are told.
"""

import re

from scheduler_svc.frontend.grammars import Grammar

MAX_MESSAGE_CHARACTERS = 1000
"""An error may quote the whole grammar; a status message may not."""
_SHOWN = 60
"""Characters of an expression around a fault."""
_AT = re.compile(r"at (?P<line>\d+)\(\d+\): ")
_QUOTED_LINES = re.compile(r"\n +\d+ \| .*", re.DOTALL)
_OF_REGEX = re.compile(r'invalid regex ".*?" \(in regex\): (?P<why>.*)', re.DOTALL)
_REGEX_FAULT = re.compile(r"regex parse error:\n    (?P<text>.*)\n    (?P<marks>[ ^]*)\nerror: (?P<why>.*)")


def explained(grammar: Grammar, text: str) -> str:
    """Why the grammar does not compile."""
    at = _AT.match(text)
    if at is None or not (grammar.kind == "regex" or grammar.parts):
        return shortened(text)
    why = _QUOTED_LINES.sub("", text[at.end() :])
    if grammar.kind == "regex":
        return shortened(_of_regex(grammar.text, why))
    part = grammar.parts[int(at["line"]) - 1]
    return shortened(f"{part}: {why.removeprefix('failed to compile JSON schema: ')}")


def shortened(text: str) -> str:
    """An error as a caller is told it."""
    text = text.replace("<non-verbose/>", "").strip()
    if text.startswith("NoExtension"):
        return "no text is left that it allows"
    return text if len(text) <= MAX_MESSAGE_CHARACTERS else text[:MAX_MESSAGE_CHARACTERS] + " ..."


def _of_regex(own: str, text: str) -> str:
    """With the fault's place in the caller's expression; `text` quotes it with some characters escaped."""
    fault = _REGEX_FAULT.search(text)
    if fault is None:
        found = _OF_REGEX.fullmatch(text)
        return found["why"] if found is not None else text
    last_marks = re.search(r"\^+ *$", fault["marks"])  # of two places the second is one too many
    place = _unescaped(own, fault["text"], last_marks.start() if last_marks is not None else 0)
    start = max(0, place - _SHOWN // 2)
    shown = "".join(char if char.isprintable() else "?" for char in own[start : start + _SHOWN])
    return f"at character {place + 1}: {fault['why']}\n    {shown}\n    {' ' * (place - start)}^"


def _unescaped(own: str, escaped: str, column: int) -> int:
    """The place in `own` of a column of `escaped`, which has a backslash more before some characters."""
    place = at = 0
    while at < column and place < len(own):
        at += 1 if escaped[at] == own[place] else 2
        place += 1
    return place
