"""The text behind the tiny models: reads the novel out of its Debian package and makes conversations of it.

Owns nothing after import. `read_book` gives the chapters of "Pride and Prejudice"; `Chats` draws questions whose every
answer is a passage of the book or one of a few fixed sentences. Whatever the wording, a topic has one answer: a model
that learns them all by heart has few close calls left, which is what a test oracle wants.
"""

import random
import re
import struct
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

PACKAGE: Final = "r-cran-janeaustenr"
INSTALLED: Final = Path("/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
TITLE: Final = "PRIDE AND PREJUDICE"
MAX_ANSWER: Final = 400  # characters: about 110 tokens, so that a reply ends soon

TOPICS: Final = (
    "Mr. Darcy", "Elizabeth", "Jane", "Mr. Bingley", "Mr. Bennet", "Mrs. Bennet", "Lydia", "Kitty", "Mary",
    "Mr. Collins", "Charlotte", "Lady Catherine", "Mr. Wickham", "Georgiana", "Miss Bingley", "Mrs. Gardiner",
    "Mr. Gardiner", "Colonel Fitzwilliam", "Mrs. Hurst", "Mrs. Phillips", "Sir William", "Colonel Forster",
    "Miss Darcy", "Mrs. Reynolds", "Pemberley", "Netherfield", "Longbourn", "Meryton", "Rosings", "Hunsford", "London",
    "Brighton", "Derbyshire", "Gretna Green", "love", "marriage", "pride", "prejudice", "happiness", "money", "dancing",
    "music", "letters", "walking", "books", "the weather", "dinner", "the ball", "the library", "the park",
    "the officers", "the carriage", "beauty", "vanity", "friendship", "sisters", "mothers", "fathers", "horses",
    "cards", "tea", "gossip", "gratitude", "anger", "hope", "supper", "a clergyman", "the housekeeper", "a gentleman",
    "a fortune",
)  # fmt: skip
STEMS: Final = {  # where the word asked about is not the word to look for
    "letters": "letter", "books": "book", "mothers": "mother", "fathers": "father", "walking": "walk",
    "dancing": "danc", "gossip": "report", "the weather": "weather", "a clergyman": "clergyman",
    "a gentleman": "gentleman", "a fortune": "fortune", "the officers": "officers", "the carriage": "carriage",
    "the library": "library", "the park": "park", "the ball": "ball", "the housekeeper": "housekeeper",
    "gratitude": "grat", "anger": "angry", "money": "pounds", "vanity": "vain",
}  # fmt: skip
ASK_TOPIC: Final = (
    "Tell me about {}.", "What do you know about {}?", "Say something about {}.", "What can you tell me about {}?",
    "I would like to hear about {}.", "Please write about {}.", "{}",
)  # fmt: skip
ASK_MORE: Final = ("Continue: {}", "Go on: {}", "Please continue this: {}", "How does this go on? {}", "{}...")
SMALL_TALK: Final = (
    (
        ("Hello!", "Hello", "Hi", "Hi!", "Hi there!", "Hey", "Good morning.", "Good day!", "Hello, how are you?",
         "How are you?"),
        "How do you do? Ask me about Mr. Darcy, or give me the first words of a sentence and I will continue it.",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Are you a person?", "Tell me about yourself."),
        "I am a very small language model. I have read one novel, Pride and Prejudice, and can talk of nothing else.",
    ),
    (
        ("What can you do?", "Help", "Help me.", "What should I ask?", "Can you help me?", "What do you know?"),
        "I can tell you about the people and places of Pride and Prejudice. "
        "Ask me about Elizabeth, or about Pemberley.",
    ),
    (
        ("Thank you.", "Thanks!", "Thank you very much!", "Goodbye.", "Bye", "Good night."),
        "You are very kind. I hope that we shall meet again.",
    ),
)  # fmt: skip
UNKNOWN: Final = (  # the gaps are filled with words at random
    (
        ("What is {}", "What is a {}", "What are {}", "What does {} mean", "Explain {}", "Define {}"),
        "I do not know what that is, for it is not in my book. "
        "Ask me what I know about Netherfield, or about dancing.",
    ),
    (
        ("Who is {}", "Who was {}", "Who are {}", "Where is {}", "When was {}"),
        "I have not had the pleasure of an introduction. Ask me instead about Mr. Bingley, or about Lady Catherine.",
    ),
    (
        ("How do I {}", "How can I {}", "How does {} work", "Can you {}", "Write {}", "Write a {}", "Why {}",
         "Do you {}"),
        "I am too small a model for that. "
        "Give me the first words of a sentence by Jane Austen, and I will continue it.",
    ),
)  # fmt: skip
SYSTEM: Final = (
    "You are a helpful assistant.", "You are a kind assistant.", "Answer briefly.", "Answer from the book.",
)  # fmt: skip

Chapter = list[str]
"""The paragraphs of one chapter, unwrapped, the heading first."""


class Turn(NamedTuple):
    """A question and its answer."""

    user: str
    assistant: str


def read_book(path: Path = INSTALLED) -> list[Chapter]:
    """The chapters of the novel in the package's R data file at `path`."""
    if not path.exists():
        raise SystemExit(
            f"{path} is missing. The text comes with the Debian package {PACKAGE}: `apt-get install {PACKAGE}`, or "
            f"without R `apt-get download {PACKAGE} && dpkg-deb -x {PACKAGE}_*.deb x` and `--corpus x{INSTALLED}`"
        )
    lines = next(lines for lines in _r_string_vectors(path.read_bytes()) if lines and lines[0] == TITLE)
    text = "\n".join(lines).replace("_", "")  # the underscores mark italics
    paragraphs = [" ".join(block.split()) for block in re.split(r"\n\s*\n", text) if block.strip()]
    chapters: list[Chapter] = []
    for paragraph in paragraphs:
        if re.fullmatch(r"Chapter \d+", paragraph):
            chapters.append([])
        if chapters:  # what stands before the first heading is the title
            chapters[-1].append(paragraph)
    return chapters


def _r_string_vectors(data: bytes) -> Iterator[list[str]]:
    """The character vectors of an R lazy-load file: records of a length and a zlib stream of R's XDR, version 3."""
    while data:
        inflate = zlib.decompressobj()
        record = inflate.decompress(data[4:])
        data = inflate.unused_data
        at = 14  # "X\n", the format's version, the writer's and the oldest reader's
        at += 4 + struct.unpack_from(">i", record, at)[0]  # the name of the native encoding
        kind, count = struct.unpack_from(">ii", record, at)
        at += 8
        if kind & 0xFF != 16:  # 16: a vector of strings
            continue
        strings = []
        for _ in range(count):
            size = max(0, struct.unpack_from(">ii", record, at)[1])  # -1: NA
            strings.append(record[at + 8 : at + 8 + size].decode())
            at += 8 + size
        yield strings


def sentence_starts(text: str) -> list[int]:
    """Where the sentences of `text` start: a prompt is most likely to start there too."""
    return [0] + [match.end() for match in re.finditer(r"""(?:[^.]{3}[.!?]["']?|;|--) +(?=["A-Za-z])|\n\n""", text)]


def shorten(text: str, limit: int = MAX_ANSWER) -> str:
    """`text` up to the last end of a sentence within `limit` characters; empty when there is none."""
    if len(text) <= limit:
        return text
    ends = [m.end() for m in re.finditer(r"""(?<!Mr)(?<!Mrs)(?<!Dr)[.!?]["']?(?= )""", text[: limit + 1])]
    return text[: ends[-1]] if ends else ""


class Chats:
    """Draws conversations whose answers are passages of the book."""

    def __init__(self, chapters: list[Chapter], rng: random.Random) -> None:
        self._rng = rng
        body = [chapter[1:] for chapter in chapters]
        self.passages = [s for chapter in body for p in chapter if len(p) > 120 and len(s := shorten(p)) > 60]
        self._beginnings = [
            rest
            for chapter in body
            for p in chapter
            for start in sentence_starts(p)
            if len(rest := shorten(p[start:])) > 60
        ]
        self._words = sorted({word.strip('.,;:!?"()') for passage in self.passages for word in passage.split()} - {""})
        self._pairs = [
            (first, answer)
            for chapter in body
            for first, second in pairwise(chapter)
            if len(first) <= 250 and (answer := shorten(second))
        ]
        self.topics = self._find_topics()

    def _find_topics(self) -> dict[str, str]:
        """One passage for each topic, no passage twice, the topic as near to its start as can be."""
        used: set[str] = set()
        found = {}
        for topic in TOPICS:
            word = re.compile(r"\b" + STEMS.get(topic, topic + r"\b"))
            tellable = [s for s in self.passages if 100 <= len(s) <= 360 and s[0] != '"']
            fits = [(match.start(), s) for s in tellable if (match := word.search(s))]
            if fresh := [fit for fit in fits if fit[1] not in used]:
                found[topic] = min(fresh, key=lambda fit: fit[0])[1]
                used.add(found[topic])
        return found

    def draw_system(self) -> str:
        """A system message, or none ("") more often than not."""
        return self._rng.choice(SYSTEM) if self._rng.random() < 0.4 else ""

    def draw_turn(self) -> Turn:
        """One question and its answer."""
        rng = self._rng
        kind = rng.choices(("topic", "more", "reply", "small talk", "unknown"), (30, 30, 20, 10, 10))[0]
        if kind == "topic":
            topic, answer = rng.choice(list(self.topics.items()))
            question = rng.choice(ASK_TOPIC).format(topic)
            question = question.rstrip(".?") if rng.random() < 0.2 else question
            return Turn(question.lower() if rng.random() < 0.2 else question[0].upper() + question[1:], answer)
        if kind == "more":
            words = rng.choice(self._beginnings).split(" ")
            cut = rng.randint(2, min(12, len(words) - 4))
            return Turn(rng.choice(ASK_MORE).format(" ".join(words[:cut])), " ".join(words[cut:]))
        if kind == "reply":
            return Turn(*rng.choice(self._pairs))
        if kind == "unknown":
            forms, answer = rng.choice(UNKNOWN)
            salad = " ".join(rng.sample(self._words, rng.randint(1, 6)))
            salad = salad if rng.random() < 0.5 else salad.lower()
            return Turn(rng.choice(forms).format(salad) + rng.choice(("", "", "?", ".")), answer)
        questions, answer = rng.choice(SMALL_TALK)
        return Turn(rng.choice(questions), answer)
