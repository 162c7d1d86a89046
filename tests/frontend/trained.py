"""Small tokenizers of every family, trained on a few lines of text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXT = [
    "The quick brown fox jumps over the lazy dog. It didn't stop; it wouldn't, they've said!",
    "def add(a, b):\n    return a + b\n\n\tif x != y: print('no')\n",
    "naïve café façade, Ünïcödé and coöperation — “quotes” … 1234567890",
    "東京は日本の首都です。今日はいい天気ですね。你好世界",
    "👩‍👩‍👧‍👦 family 🎉🎉 party ❤️ love 🇩🇪 flag e\u0301 combining n\u0303",
    "We 're here , are n't we ? I 'm ' sure ' that 's it . We 've won !",
    "Привет, мир! مرحبا بالعالم",
] * 3
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen: a vocabulary of bytes; begins texts with <s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), "é", "你好", "two words"])
    return with_bos(tokenizer)


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def llama_2() -> Tokenizer:
    """SentencePiece BPE with byte fallback, as converted for Llama 2."""
    base = Tokenizer(models.BPE())
    base.pre_tokenizer = pre_tokenizers.Metaspace()
    base.train_from_iterator(
        TEXT[:3], trainers.BpeTrainer(vocab_size=250, special_tokens=SPECIAL + BYTES, show_progress=False)
    )
    model = json.loads(base.to_str())["model"]
    vocab = dict(model["vocab"])
    for name in (*"▁東京abc", "true", "▁true"):
        vocab.setdefault(name, len(vocab))
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return with_bos(tokenizer)


def gemma() -> Tokenizer:
    """Byte fallback, but no space before the text."""
    tokenizer = llama_2()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def unigram() -> Tokenizer:
    """SentencePiece unigram with a Metaspace decoder, as of T5."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=220, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT: a word's later pieces begin with ##; the decoded text is cleaned up."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def word_level() -> Tokenizer:
    """Whole words and no decoder: joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(
        TEXT, trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False)
    )
    return tokenizer


def end_of_word() -> Tokenizer:
    """BPE with "</w>" at the ends of words, as of GPT-1: the decoder treats the last token in its own way."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def unknown_decoder() -> Tokenizer:
    """A decoder without steps: text can only be obtained by `decode`."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteLevel(), decoders.Replace(_regex("q"), "k"), decoders.Fuse()]
    )
    return tokenizer


def _regex(pattern: str) -> Any:
    from tokenizers import Regex

    return Regex(pattern)


FAMILIES: dict[str, Any] = {
    "byte_level": byte_level,
    "llama_2": llama_2,
    "gemma": gemma,
    "unigram": unigram,
    "word_piece": word_piece,
    "word_level": word_level,
    "end_of_word": end_of_word,
    "unknown_decoder": unknown_decoder,
}
CLEANED = ("word_piece", "word_level", "unigram")


def save(tokenizer: Tokenizer, folder: Path, **config: Any) -> Path:
    """Write the folder of a tokenizer with the files that models have."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, **NAMED, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def save_all(folder: Path) -> dict[str, Path]:
    """Write a folder for each family."""
    return {
        name: save(make(), folder / name, clean_up_tokenization_spaces=name in CLEANED)
        for name, make in FAMILIES.items()
    }
