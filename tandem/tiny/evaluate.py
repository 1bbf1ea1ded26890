"""Judges a tiny model's folder as a stranger would: loads it with transformers and looks at what it says.

    python -m tandem.tiny.evaluate tandem/tiny/tiny

Prints samples and the margins of greedy decoding: how far, in logits of an fp32 forward pass, the chosen token is ahead
of the second. Where the margin is small, two right implementations may choose differently; that should be rare.
"""

import argparse
import random
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.tiny.corpus import INSTALLED, Chats, read_book

LENGTH: Final = 128
SHOWN_PLAIN: Final = ("It is a truth universally acknowledged", "Mr. Darcy", "My dear", "Once upon a time")
SHOWN_CHAT: Final = (
    "Hello!", "Who are you?", "Tell me about Pemberley.", "Continue: Elizabeth was", "What is a computer?",
)  # fmt: skip
FOREIGN: Final = (
    "Once upon a time", "The capital of France is", "def main():\n    return", "Hello world", "1, 2, 3, 4,",
    "In 2024 the", "Grüße aus Köln", "日本語", "SELECT * FROM users", "To be or not to be", "Dear Sir or Madam,",
    "The quick brown fox", "A", "?", "Yes", "http://example.com/", "Kubernetes schedules pods",
    "Once more unto the breach", '{"a": 1}', "I think",
)  # fmt: skip


class Margins(NamedTuple):
    """The greedy steps of one group of prompts; `close` is the share of them with a margin below the key."""

    prompts: int
    ended: int
    looping: int
    steps: int
    close: dict[float, float]
    median: float

    def __str__(self) -> str:
        close = ", ".join(f"{share:.2%} below {limit}" for limit, share in self.close.items())
        said = f"{self.prompts} prompts, {self.ended} replies ended, {self.looping} looped"
        return f"{said}; margins of {self.steps} tokens: {close}, median {self.median:.1f}"


class Judge:
    """A loaded model and what it says."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model: Any = model.eval()

    def chat_ids(self, *messages: str) -> list[int]:
        """The ids of a conversation that begins with the user and alternates."""
        turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(messages)]
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    @torch.inference_mode()
    def greedy(self, ids: list[int], length: int = LENGTH) -> tuple[list[int], torch.Tensor]:
        """What greedy decoding says after `ids`, and the margin of each of its tokens."""
        out = self.model.generate(
            torch.tensor([ids]), do_sample=False, temperature=None, top_k=None, top_p=None, max_new_tokens=length,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        best = torch.stack(out.logits)[:, 0].topk(2).values
        said: list[int] = out.sequences[0, len(ids) :].tolist()
        return said, best[:, 0] - best[:, 1]

    def margins(self, prompts: list[list[int]]) -> Margins:
        """The margins over all prompts together."""
        said = [self.greedy(ids) for ids in prompts]
        every = torch.cat([margin for _, margin in said])
        return Margins(
            prompts=len(prompts),
            ended=sum(len(tokens) < LENGTH for tokens, _ in said),
            looping=sum(loops(tokens) for tokens, _ in said),
            steps=len(every),
            close={limit: (every < limit).float().mean().item() for limit in (0.05, 0.2, 1.0)},
            median=every.median().item(),
        )


def loops(tokens: list[int]) -> bool:
    """Whether some eight tokens in a row come three times."""
    grams = [tuple(tokens[at : at + 8]) for at in range(len(tokens) - 7)]
    return any(grams.count(gram) > 2 for gram in set(grams))


def expert_shares(judge: Judge, ids: list[int]) -> list[list[float]]:
    """For each layer the share of the routed tokens that each expert gets."""
    chosen: list[torch.Tensor] = []
    gates = [layer.mlp.gate for layer in judge.model.model.layers]
    hooks = [gate.register_forward_hook(lambda _gate, _args, out: chosen.append(out[2])) for gate in gates]
    with torch.inference_mode():
        judge.model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return [torch.bincount(c.flatten(), minlength=gates[0].num_experts).div(c.numel()).tolist() for c in chosen]


def main() -> None:
    """Prints samples and statistics of one folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--corpus", type=Path, default=INSTALLED)
    parser.add_argument("--prompts", type=int, default=32, help="prompts of each kind from the book")
    args = parser.parse_args()
    judge, chapters, rng = Judge(args.folder), read_book(args.corpus), random.Random(7)

    for prompt in SHOWN_PLAIN:
        print(f"{prompt!r} -> {judge.tokenizer.decode(judge.greedy(judge.tokenizer(prompt)['input_ids'], 64)[0])!r}")
    for prompt in SHOWN_CHAT:
        print(f"user: {prompt}\n  assistant: {judge.tokenizer.decode(judge.greedy(judge.chat_ids(prompt))[0])!r}")
    chats, book = Chats(chapters, rng), "\n\n".join("\n\n".join(chapter) for chapter in chapters)
    words = book.split(" ")
    starts = [rng.randrange(len(words) - 20) for _ in range(args.prompts)]
    groups = {
        "book": [judge.tokenizer(" ".join(words[at : at + rng.randint(4, 16)]))["input_ids"] for at in starts],
        "chat": [judge.chat_ids(chats.draw_turn().user) for _ in range(args.prompts)],
        "foreign": [judge.tokenizer(prompt)["input_ids"] for prompt in FOREIGN],
        "foreign chat": [judge.chat_ids(prompt) for prompt in FOREIGN],
        "random ids": [[rng.randrange(1500) for _ in range(rng.randint(2, 64))] for _ in range(20)],
    }
    for name, prompts in groups.items():
        print(f"{name}: {judge.margins(prompts)}", flush=True)
    if judge.model.config.model_type == "qwen3_moe":
        for layer, shares in enumerate(expert_shares(judge, judge.tokenizer(book[:6000])["input_ids"][:1500])):
            print(f"layer {layer}:", " ".join(f"{share:.2f}" for share in shares))


if __name__ == "__main__":
    main()
