"""A process that tries grammars before a frontend compiles them: one that takes too long can be ended by ending it.

`python -m scheduler_svc.frontend.grammar_check --model FOLDER`. Answers each line of standard input, a Grammar as JSON,
with a line: an empty one, or what is wrong with the grammar as JSON text. The first line says that it is ready.
"""

import argparse
import json
import resource
import sys
from pathlib import Path

from scheduler_svc.frontend.grammars import Grammar
from scheduler_svc.frontend.matcher import GrammarError, GrammarTokenizer, compile_grammar
from scheduler_svc.frontend.vocabulary import Vocabulary, load_tokenizer
from shared.model_config import load_model_config
from shared.process import die_with_parent

MEMORY_BYTES = 4 << 30
"""Address space: a grammar that needs more ends this process and not the machine."""


def main() -> int:
    """Until standard input ends."""
    die_with_parent()
    parser = argparse.ArgumentParser(description="Tries grammars for a frontend")
    parser.add_argument("--model", required=True, type=Path)
    folder = parser.parse_args().model
    model = load_model_config(folder)
    tokenizer = load_tokenizer(folder)
    tokens = GrammarTokenizer(tokenizer, Vocabulary(tokenizer), model.vocabulary_size, model.eos_token_ids)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    print(flush=True)
    for line in sys.stdin:
        print(_problem(Grammar(**json.loads(line)), tokens), flush=True)
    return 0


def _problem(grammar: Grammar, tokens: GrammarTokenizer) -> str:
    try:
        compile_grammar(grammar, tokens)
    except GrammarError as error:
        return json.dumps(str(error))
    return ""


if __name__ == "__main__":
    sys.exit(main())
