"""Train the embedded demo model: a small Llama on documentation that comes with Python.

    python benchmarks/train_demo.py --out pagewire/demo --minutes 20

The text is `pydoc_data.topics` and the docstrings of the standard library (PSF license), as plain documents
and as short conversations in the chat format. The model card is written with what was really reached.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import math
import pydoc_data.topics
import random
import re
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCAB_SIZE = 4096
SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
PAD, BOS, EOS, IM_START, IM_END = range(5)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTIONS = (
    "What is {}?",
    "Explain {}.",
    "Tell me about {}.",
    "How does {} work?",
    "What does {} do in Python?",
)
ANSWER_REPEATS = 2
PROMPT = 'The "with" statement is used to'
QUESTION = "What is the with statement?"


@dataclass
class Corpus:
    """Documents as text: plain ones, and (question, answer) pairs."""

    documents: list[str]
    answers: list[tuple[str, str]]


def clean(text: str) -> str:
    """Plain lines: headings and trailing spaces go, indentation of whole documents too."""
    text = inspect.cleandoc(text)
    text = re.sub(r"\n[*=~^-]{4,}\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def opening(text: str, limit: int = 500) -> str:
    """The first sentences of a document, up to `limit` characters, ending with a full stop."""
    paragraphs = [" ".join(p.split()) for p in text.split("\n\n")]
    prose = " ".join(
        p for p in paragraphs if len(p) > 60 and "::=" not in p and not p.startswith((">>>", "See"))
    )
    cut = prose[:limit].rfind(". ")
    return prose[: cut + 1] if cut > 60 else ""


def docstrings() -> list[tuple[str, str]]:
    """(name, docstring) of the public modules, classes and functions of the standard library."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8", errors="ignore"))
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node)
                name = path.stem if isinstance(node, ast.Module) else f"{path.stem}.{node.name}"
                if text and len(text) > 80 and "._" not in name:
                    found.append((name, text))
    return found


def read_corpus() -> Corpus:
    """All text, cleaned."""
    topics = [(name.lower(), clean(text)) for name, text in sorted(pydoc_data.topics.topics.items())]
    strings = [(name, clean(text)) for name, text in docstrings()]
    answers = []
    for name, text in topics:
        if answer := opening(text):
            title = text.split("\n", 1)[0].strip().replace('"', "`").rstrip(".")
            subject = title[0].lower() + title[1:] if 3 < len(title) < 60 else name
            answers += [(subject, answer), (name, answer)]
            if subject.startswith("the "):
                answers.append((subject[4:], answer))
    answers += [(name, answer) for name, text in strings if (answer := opening(text, 300))]
    return Corpus([text for _, text in topics] + [f"{name}: {text}" for name, text in strings], answers)


def train_tokenizer(corpus: Corpus) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer over the corpus, with the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(corpus.documents, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = TEMPLATE
    return fast


def conversation(subject: str, answer: str, rng: random.Random) -> str:
    """One exchange in the chat format."""
    question = rng.choice(QUESTIONS).format(subject)
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"


def token_stream(corpus: Corpus, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Tensor:
    """The corpus in a random order as one line of token ids."""
    texts = [text + "</s>" for text in corpus.documents]
    texts += [conversation(subject, answer, rng) for subject, answer in corpus.answers * ANSWER_REPEATS]
    rng.shuffle(texts)
    return torch.tensor([i for ids in tokenizer(texts)["input_ids"] for i in ids])


def learning_rate(share: float, peak: float) -> float:
    """Warm-up over the first 2 percent, then a cosine down to 2 percent of the peak."""
    if share < 0.02:
        return peak * share / 0.02
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (share - 0.02) / 0.98)))


def make_optimizers(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms; same scale of updates."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.1, fused=True),
    ]


def loss_of(model: torch.nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token; batch [B, T] of token ids. In float32 where bfloat16 is slower."""
    is_narrow = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    with torch.autocast("cpu", torch.bfloat16, enabled=is_narrow):
        logits = model(input_ids=batch, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), batch[:, 1:].flatten())


@dataclass
class Report:
    """What training reached."""

    num_parameters: int
    num_tokens_seen: int
    minutes: float
    train_loss: float
    held_out_loss: float


def held_out(corpus: Corpus) -> Corpus:
    """The documents that no model is trained on."""
    return Corpus(corpus.documents[::20], [])


def train(
    model: PreTrainedModel,
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
    minutes: float,
    *,
    compiles: bool = True,
) -> Report:
    """Train for so many minutes; every 20th document is held out. compiles: with torch.compile."""
    rng = random.Random(0)
    kept = Corpus([d for i, d in enumerate(corpus.documents) if i % 20], corpus.answers)
    length, rows, peak = 512, 12, 3e-3
    optimizers = make_optimizers(model)
    compiled = torch.compile(model) if compiles else model
    begin, seen, step, smooth = time.monotonic(), 0, 0, 0.0
    stream, place = token_stream(kept, tokenizer, rng), 0
    while (elapsed := time.monotonic() - begin) < minutes * 60:
        if place + length * rows > len(stream):
            stream, place = token_stream(kept, tokenizer, rng), rng.randrange(length)
        batch = stream[place : place + length * rows].view(rows, length)
        place += length * rows
        loss = loss_of(compiled, batch)
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(elapsed / (minutes * 60), peak)
            optimizer.step()
        seen, step = seen + batch.numel(), step + 1
        smooth = loss.item() if step == 1 else 0.98 * smooth + 0.02 * loss.item()
        if step % 25 == 0:
            rate, left = seen / (elapsed + 1e-9), minutes - elapsed / 60
            print(f"step {step}  loss {smooth:.3f}  {rate:,.0f} tokens/s  {left:.1f} min left", flush=True)
    return Report(
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_tokens_seen=seen,
        minutes=(time.monotonic() - begin) / 60,
        train_loss=smooth,
        held_out_loss=held_out_loss(model, token_stream(held_out(corpus), tokenizer, rng), length),
    )


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, stream: Tensor, length: int) -> float:
    """Mean loss over a line of tokens, in pieces of `length`."""
    pieces = stream[: len(stream) // length * length].view(-1, length)
    return sum(loss_of(model, piece[None]).item() for piece in pieces) / len(pieces)


@torch.no_grad()
def sample(folder: Path, prompt: str, *, do_sample: bool) -> str:
    """What the saved weights say."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    torch.manual_seed(0)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(
        **inputs, max_new_tokens=120, do_sample=do_sample, temperature=0.8 if do_sample else None
    )
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def save(folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write weights in bfloat16, configuration and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config.eos_token_id = [EOS, IM_END]
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_card(folder: Path, report: Report) -> None:
    """The model card, with figures and samples of the saved weights."""
    chat = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    config = json.loads((folder / "config.json").read_text())
    (folder / "README.md").write_text(
        f"""# The demo model

A Llama of {report.num_parameters:,} parameters ({config["num_hidden_layers"]} layers, hidden size
{config["hidden_size"]}, {config["num_attention_heads"]} query and {config["num_key_value_heads"]} key-value heads,
vocabulary {config["vocab_size"]}, context {config["max_position_embeddings"]}), stored in bfloat16. It shows that
an engine works; it recites Python's documentation, and knows nothing else.

Trained from scratch by `benchmarks/train_demo.py` on the documentation topics and docstrings that come with
CPython (PSF license), for {report.minutes:.0f} minutes on two CPU cores: {report.num_tokens_seen / 1e6:.1f} million
tokens. Loss in nats per token: {report.train_loss:.2f} in training, {report.held_out_loss:.2f} on held-out
documents.

Greedy, after `{PROMPT}`:

> {sample(folder, PROMPT, do_sample=False).strip().replace(chr(10), chr(10) + "> ")}

At temperature 0.8:

> {sample(folder, PROMPT, do_sample=True).strip().replace(chr(10), chr(10) + "> ")}

Asked "{QUESTION}" in a chat:

> {sample(folder, chat, do_sample=False).strip().replace(chr(10), chr(10) + "> ")}
"""
    )


def main() -> None:
    """Train, save, and write the card."""
    parser = argparse.ArgumentParser(description="Train the embedded demo model.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=20.0)
    options = parser.parse_args()
    torch.manual_seed(0)
    corpus = read_corpus()
    tokenizer = train_tokenizer(corpus)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    model = LlamaForCausalLM(config)
    size = sum(map(len, corpus.documents))
    print(f"{size / 1e6:.1f} million characters, {sum(p.numel() for p in model.parameters()):,} parameters")
    report = train(model, corpus, tokenizer, options.minutes)
    print(report)
    save(options.out, model, tokenizer)
    write_card(options.out, report)
    print((options.out / "README.md").read_text())


if __name__ == "__main__":
    main()
