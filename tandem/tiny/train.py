"""Trains one of the tiny models from nothing: corpus, tokenizer, weights, folder.

    python -m tandem.tiny.train --kind dense --device cuda --minutes 5 --out tandem/tiny/tiny

Owns the shapes of both models and their training; the text is `corpus.py`'s and the judgement `evaluate.py`'s. The
models are meant to know their book by heart: a memorised text leaves the greedy choice few close calls, so that a test
can compare two implementations of the same model token by token.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tandem.tiny.corpus import INSTALLED, Chapter, Chats, read_book, sentence_starts

VOCAB: Final = 1536
SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ROW: Final = 512
LONG_ROW: Final = 2048  # the longest position either model has seen
PIECE: Final = 64  # tokens between the seams of a patchwork row
IGNORE: Final = -100

# What no merge may cross the edge of: a contraction, a word with what stands before it, one digit, punctuation, space.
PIECES: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
COMMON: Final[dict[str, Any]] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": VOCAB - 3,
    "eos_token_id": VOCAB - 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": LONG_ROW,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 100000,  # no library's default: whoever does not read it here computes something else
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB,
}
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "dense": COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 192,
        "intermediate_size": 384,
        "max_window_layers": 4,
        "num_hidden_layers": 4,
        "tie_word_embeddings": True,
    },
    "moe": COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "hidden_size": 128,
        "intermediate_size": 192,  # of a dense layer, and there is none
        "max_window_layers": 5,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 5,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
    },
}
GENERATION: Final[dict[str, Any]] = {
    "bos_token_id": VOCAB - 3,
    "do_sample": True,
    "eos_token_id": [VOCAB - 1, VOCAB - 3],
    "pad_token_id": VOCAB - 3,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
}


class Rows(NamedTuple):
    """Token ids and, for each, the token that should follow (or `IGNORE`)."""

    ids: torch.Tensor
    targets: torch.Tensor


def train_tokenizer(chapters: list[Chapter]) -> Tokenizer:
    """A byte-level BPE tokenizer: each byte has a token, nothing is normalized, so any text comes back as it was."""
    tokenizer = Tokenizer(models.BPE())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PIECES), "isolated"), to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(("\n\n".join(chapter) for chapter in chapters), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


class Twins:
    """For each place of the stream, the places with the same `count` tokens before them."""

    def __init__(self, stream: torch.Tensor, count: int) -> None:
        before = torch.stack([stream.roll(back) for back in range(1, count + 1)])
        key = (before * (VOCAB ** torch.arange(count, device=stream.device))[:, None]).sum(0)
        self._order = key.argsort()
        _, group, sizes = torch.unique(key, return_inverse=True, return_counts=True)
        self._first, self._size = (sizes.cumsum(0) - sizes)[group], sizes[group]

    def draw(self, places: torch.Tensor) -> torch.Tensor:
        """One of the like places for each of `places`, perhaps itself."""
        step = (torch.rand(len(places), device=places.device) * self._size[places]).long()
        return self._order[self._first[places] + step]


class Data:
    """The training rows, all on the device: they are a few dozen megabytes, and a step must not wait for the host."""

    def __init__(self, chapters: list[Chapter], tokenizer: Tokenizer, device: str, chat_rows: int) -> None:
        self._tokenizer = tokenizer
        self._end, self._im_start, self._im_end = range(VOCAB - len(SPECIAL), VOCAB)
        texts = ["\n\n".join(chapter) for chapter in chapters]
        stream = [token for text in texts for token in [*self._encode(text), self._end]]
        # The last chapter runs into the first: every window is whole.
        self._stream = torch.tensor(stream + stream[: LONG_ROW + 1], device=device)
        self.tokens = len(stream)
        self._twins = [Twins(self._stream[: self.tokens], count) for count in (1, 2)]
        self._starts = self._stack(self._sentence_rows(texts), device)
        self._chats = self._stack(self._chat_rows(Chats(chapters, random.Random(1)), chat_rows), device)
        self._device = device

    def batch(self, rows: int) -> Rows:
        """Rows of `ROW` tokens, a quarter of each: from anywhere, patchwork, from a sentence's start, conversations."""
        n = rows // 4
        parts = [self._windows(n, ROW), self._patchwork(n), self._pick(self._starts, n), self._pick(self._chats, n)]
        return Rows(torch.cat([part.ids for part in parts]), torch.cat([part.targets for part in parts]))

    def long_batch(self, rows: int) -> Rows:
        """Rows of `LONG_ROW` tokens, so that late positions are trained: half book, half several conversations."""
        half, chats = rows // 2, self._pick(self._chats, rows // 2 * (LONG_ROW // ROW))
        book = self._windows(rows - half, LONG_ROW)
        return Rows(
            torch.cat([book.ids, chats.ids.reshape(half, LONG_ROW)]),
            torch.cat([book.targets, chats.targets.reshape(half, LONG_ROW)]),
        )

    def _windows(self, rows: int, length: int) -> Rows:
        at = torch.randint(self.tokens, (rows, 1), device=self._device) + torch.arange(length + 1, device=self._device)
        window = self._stream[at]
        return Rows(window[:, :-1], window[:, 1:])

    def _patchwork(self, rows: int) -> Rows:
        """Pieces of the book joined where their last one or two tokens agree; the step across a seam is not learned.

        A prompt that is not in the book leaves the model in such a place. It should then go on with some passage of the
        book, rather than with a mixture of all that come to mind.
        """
        pieces = ROW // PIECE + 2
        at, ids, learn = torch.randint(self.tokens, (rows,), device=self._device), [], []
        for _ in range(pieces):
            ids.append(self._stream[at[:, None] + torch.arange(PIECE, device=self._device)])
            learn.append(torch.arange(PIECE, device=self._device).expand(rows, -1) > 0)
            ends = (at + PIECE) % self.tokens
            coin = torch.rand(rows, device=self._device) < 0.5
            at = torch.where(coin, self._twins[0].draw(ends), self._twins[1].draw(ends))
        span = torch.randint(PIECE, (rows, 1), device=self._device) + torch.arange(ROW + 1, device=self._device)
        window, keep = torch.cat(ids, 1).gather(1, span), torch.cat(learn, 1).gather(1, span)
        return Rows(window[:, :-1], window[:, 1:].where(keep[:, 1:], IGNORE))

    def _pick(self, rows: Rows, count: int) -> Rows:
        at = torch.randint(len(rows.ids), (count,), device=self._device)
        return Rows(rows.ids[at], rows.targets[at])

    def _sentence_rows(self, texts: list[str]) -> Iterator[tuple[list[int], list[bool]]]:
        """The text from each sentence on, tokenized afresh: a prompt's first word has no space before it."""
        for text in texts:
            for start in sentence_starts(text):
                ids = [*self._encode(text[start : start + 6 * ROW]), self._end][: ROW + 1]
                yield ids, [True] * len(ids)

    def _chat_rows(self, chats: Chats, rows: int) -> Iterator[tuple[list[int], list[bool]]]:
        """One conversation a row, as many whole turns of it as fit; only what the assistant says is learned."""
        for _ in range(rows):
            ids, learn = self._opening(chats.draw_system())
            while True:
                turn = chats.draw_turn()
                ask = [*self._message("user", turn.user), self._im_start, *self._encode("assistant\n")]
                say = [*self._encode(turn.assistant), self._im_end]
                if len(ids) + len(ask) + len(say) > ROW + 1:
                    break
                ids += ask + say + self._encode("\n")
                learn += [False] * len(ask) + [True] * len(say) + [False]
            yield ids[: ROW + 1], learn[: ROW + 1]

    def _opening(self, system: str) -> tuple[list[int], list[bool]]:
        ids = self._message("system", system) if system else []
        return ids, [False] * len(ids)

    def _message(self, role: str, text: str) -> list[int]:
        return [self._im_start, *self._encode(f"{role}\n{text}"), self._im_end, *self._encode("\n")]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def _stack(self, rows: Iterator[tuple[list[int], list[bool]]], device: str) -> Rows:
        ids, targets = [], []
        for row, learn in rows:
            fill = ROW + 1 - len(row)
            ids.append((row + [self._end] * fill)[:-1])
            targets.append(
                [token if keep else IGNORE for token, keep in zip(row, learn, strict=True)][1:] + [IGNORE] * fill
            )
        return Rows(torch.tensor(ids, device=device), torch.tensor(targets, device=device))


def all_experts(self: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """All experts side by side as one wide layer, the unchosen weighted with zero: wasteful, but of few kernels."""
    gate, up = self.gate_up_proj.chunk(2, dim=1)  # expert, intermediate, hidden
    hidden = self.act_fn(F.linear(x, gate.flatten(0, 1))) * F.linear(x, up.flatten(0, 1))
    share = torch.zeros(len(x), self.num_experts, device=x.device, dtype=weights.dtype).scatter(1, chosen, weights)
    hidden = hidden * share.repeat_interleave(self.intermediate_dim, dim=1).to(hidden.dtype)
    return F.linear(hidden, self.down_proj.transpose(0, 1).flatten(1)).to(x.dtype)


def build_model(kind: str) -> Any:
    """The model with fresh weights, in fp32."""
    ALL_EXPERTS_FUNCTIONS.register("all_experts", all_experts)
    settings = CONFIGS[kind].copy()
    for about_the_file in ("architectures", "torch_dtype", "model_type"):
        del settings[about_the_file]
    make_config: Any = Qwen3Config if kind == "dense" else Qwen3MoeConfig
    experts = {} if kind == "dense" else {"experts_implementation": "all_experts"}
    make_model: Any = AutoModelForCausalLM.from_config
    return make_model(make_config(**settings, **experts), attn_implementation="sdpa", dtype=torch.float32)


def make_loss(model: Any, kind: str, device: str) -> Callable[[Rows], tuple[torch.Tensor, torch.Tensor]]:
    """A function from rows to (what is minimised, the loss per token)."""

    def loss(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            out = model(input_ids=rows.ids, use_cache=False, output_router_logits=True if kind == "moe" else None)
        plain = F.cross_entropy(out.logits.float().flatten(0, 1), rows.targets.flatten(), ignore_index=IGNORE)
        # The balance term keeps all experts in use; 0.01 is enough for eight of them.
        return (plain + 0.01 * out.aux_loss if kind == "moe" else plain), plain.detach()

    return loss


def train(model: Any, data: Data, args: argparse.Namespace) -> dict[str, float]:
    """Runs until `--steps` or `--minutes`, whichever comes first; the learning rate falls to nothing right then."""
    loss_of = make_loss(model, args.kind, args.device)
    if args.compile:
        loss_of = torch.compile(loss_of, dynamic=False)
    rate = torch.tensor(0.0, device=args.device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=args.device == "cuda"
    )
    parameters = list(model.parameters())
    begin, step, progress, seen, smooth = time.monotonic(), 0, 0.0, 0, 0.0
    while progress < 1:
        long = step % 4 == 3
        rows = data.long_batch(max(2, args.rows // 4)) if long else data.batch(args.rows)
        objective, plain = loss_of(rows)
        torch.autograd.backward(objective)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        rate.fill_(args.rate * min(1, (step + 1) / 200) * 0.5 * (1 + math.cos(math.pi * progress)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, seen = step + 1, seen + rows.ids.numel()
        progress = max(step / args.steps, (time.monotonic() - begin) / (60 * args.minutes))
        if step % 50 == 1 or progress >= 1:  # reading the loss waits for the device, so not every time
            smooth = plain.item() if step == 1 else 0.8 * smooth + 0.2 * plain.item()
        if step % args.report == 1 or progress >= 1:
            print(f"step {step} {time.monotonic() - begin:.0f}s loss {smooth:.4f} tokens {seen:,}", flush=True)
    return {"steps": step, "seconds": round(time.monotonic() - begin, 1), "loss": round(smooth, 4), "tokens": seen}


def expert_by_expert(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights under the names of the official checkpoints, where each expert has three matrices of its own."""
    for name, weight in weights.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(weight):
                gate, up = both.chunk(2)
                yield name.replace("gate_up_proj", f"{expert}.gate_proj.weight"), gate
                yield name.replace("gate_up_proj", f"{expert}.up_proj.weight"), up
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(weight):
                yield name.replace("down_proj", f"{expert}.down_proj.weight"), down
        else:
            yield name, weight


def write_folder(folder: Path, kind: str, model: Any, tokenizer: Tokenizer) -> None:
    """Writes the checkpoint in the layout of the official ones, whatever the installed transformers would write."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().to("cpu", torch.bfloat16) for name, weight in model.state_dict().items()}
    if CONFIGS[kind]["tie_word_embeddings"]:
        weights.pop("lm_head.weight", None)
    save_file(
        {name: weight.contiguous().clone() for name, weight in expert_by_expert(weights)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "model.safetensors").chmod(0o644)  # written readable by its owner alone
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    template = Path(__file__).with_name("chat_template.jinja").read_text()
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    tokenizer_config = {
        "add_bos_token": False,
        "added_tokens_decoder": {str(tokenizer.token_to_id(token)): {"content": token, **plain} for token in SPECIAL},
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": LONG_ROW,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    files = {"config": CONFIGS[kind], "generation_config": GENERATION, "tokenizer_config": tokenizer_config}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def main() -> None:
    """Trains as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=sorted(CONFIGS), required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--corpus", type=Path, default=INSTALLED, help="the package's data file")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--rows", type=int, default=64, help=f"rows of {ROW} tokens a step")
    parser.add_argument("--chat-rows", type=int, default=12000, help="conversations made from the book")
    parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--report", type=int, default=500, help="print every so many steps")
    parser.add_argument("--compile", action="store_true", help="slow to start, then many times faster on a GPU")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    chapters = read_book(args.corpus)
    tokenizer = train_tokenizer(chapters)
    data = Data(chapters, tokenizer, args.device, args.chat_rows)
    model = build_model(args.kind).to(args.device)
    print(f"{args.kind}: {sum(p.numel() for p in model.parameters()):,} parameters, {data.tokens:,} tokens", flush=True)
    report = train(model, data, args)
    write_folder(args.out, args.kind, model, tokenizer)
    print(json.dumps({"kind": args.kind, **report}), flush=True)


if __name__ == "__main__":
    main()
