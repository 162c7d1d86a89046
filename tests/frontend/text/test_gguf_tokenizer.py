"""Tokenizers of GGUF files, against the tokenizers that were written: of tokenizers, and of SentencePiece."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from pagewire.engine_core.grammar.compile import load_tokenizer as load_grammar_tokenizer
from pagewire.frontend.text.tokenizer import load_tokenizer
from pagewire.ipc.errors import ModelNotFoundError
from pagewire.ipc.gguf.file import GgufError
from pagewire.ipc.gguf.pre_tokenizers import NAMES, RULES
from tests.frontend.trained import TEXT
from tests.gguf_headers import write

TEXTS = [
    *TEXT[:7],
    "",
    " ",
    "a",
    " leading and trailing ",
    "   three   spaces\n\n\nlines\r\n\ttabs \t",
    "I'LL don't WE'VE x'S ''s",
    "12 123 1234 3.14e-10 ½ Ⅻ ٣٤٥",
    "for (int i=0; i<n; ++i) { a[i] = b->c; } // HTTPServer camelCase",
    "<|user|>hello<|assistant|> there</s>",
    "日本語とEnglish混ぜた문장",
    "\u00a0no-break\u2003em \u200bzero",
]
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def split(expression: str) -> Any:
    return pre_tokenizers.Split(Regex(expression), "isolated")


def bytes_only() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


ORIGINALS = {  # as in the tokenizer.json of models with such tokenizers
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": pre_tokenizers.Sequence(
        [split(CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST), bytes_only()]
    ),
    "qwen2": pre_tokenizers.Sequence(
        [split(CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST), bytes_only()]
    ),
}
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]


@cache
def trained(rule: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = ORIGINALS[rule]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def byte_level_fields(tokenizer: Tokenizer, rule: str) -> dict[str, Any]:
    """The metadata of a byte-level tokenizer."""
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": vocab["<s>"],
        "tokenizer.ggml.eos_token_id": vocab["</s>"],
    }


@pytest.mark.parametrize("rule", ORIGINALS)
def test_byte_level_tokenizers_are_those_that_were_written(rule: str, tmp_path: Path) -> None:
    original = trained(rule)
    path = write(
        tmp_path / "a.gguf", byte_level_fields(original, rule) | {"tokenizer.ggml.add_bos_token": False}
    )
    tokenizer = load_tokenizer(path)
    assert (tokenizer.vocab_size, tokenizer.special_ids) == (original.get_vocab_size(), {0, 1, 2, 3, 4})
    for text in TEXTS:
        assert tokenizer.encode(text) == original.encode(text).ids, text
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_every_rule_keeps_every_character(tmp_path: Path) -> None:
    assert set(NAMES.values()) == RULES.keys()
    for rule in RULES:
        fields = byte_level_fields(trained("gpt-2"), rule)
        tokenizer = load_tokenizer(write(tmp_path / f"{rule}.gguf", fields))
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_rules_cut_words_and_numbers_in_their_own_ways() -> None:
    cuts = {
        "gpt-2": ["camelCase", "12", "Ġx"],
        "starcoder": ["camelCase", "1", "2", "Ġx"],
        "llama-bpe": ["camelCase", "12", "Ġx"],
        "qwen2": ["camelCase", "1", "2", "Ġx"],
        "qwen35": ["camelCase", "1", "2", "Ġx"],
        "tekken": ["camel", "Case", "1", "2", "Ġx"],
        "gpt-4o": ["camel", "Case", "12", "Ġx"],
        "deepseek-v3": ["camelCase", "12", "Ġx"],
        "deepseek-coder": ["camelCase", "1", "2", "Ġx"],
        "falcon": ["camelCase", "12", "Ġx"],
        "default": ["camelCase", "12", "Ġx"],
    }
    assert cuts.keys() == RULES.keys()
    for rule, words in cuts.items():
        steps = {"type": "Sequence", "pretokenizers": list(RULES[rule])}
        model = {"type": "BPE", "vocab": {}, "merges": []}
        described = {"version": "1.0", "added_tokens": [], "pre_tokenizer": steps, "model": model}
        cut = Tokenizer.from_str(json.dumps(described)).pre_tokenizer.pre_tokenize_str("camelCase12 x")
        assert [word for word, _ in cut] == words, rule


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A SentencePiece model with byte fallback, as of Llama 2."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_writer=model,
        vocab_size=480,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        user_defined_symbols=["<think>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_fields(processor: Any) -> dict[str, Any]:
    """The metadata of a SentencePiece tokenizer."""

    def kind(i: int) -> int:
        if processor.is_unknown(i):
            return 2
        return 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 4 if i == 3 else 1

    ids = range(processor.get_piece_size())
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [float(processor.get_score(i)) for i in ids],
        "tokenizer.ggml.token_type": [kind(i) for i in ids],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_tokenizers_cut_as_sentencepiece(sentences: Any, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "a.gguf", sentencepiece_fields(sentences)))
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    for text in TEXTS:
        if text.startswith((" ", "<")) or not text or "</s>" in text:
            continue  # SentencePiece puts a space before any, and has no special tokens in texts
        ids = tokenizer.encode(text)
        assert ids == [1, *sentences.encode(text)], text
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a<think>b", add_special_tokens=False).count(3) == 1


@pytest.mark.parametrize(
    ("change", "begin", "end"),
    [
        ({}, [1], []),
        ({"tokenizer.ggml.add_bos_token": False}, [], []),
        ({"tokenizer.ggml.add_eos_token": True}, [1], [2]),
    ],
    ids=["default", "no bos", "eos"],
)
def test_what_is_put_around_a_text(
    change: dict[str, Any], begin: list[int], end: list[int], sentences: Any, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "a.gguf", sentencepiece_fields(sentences) | change))
    inner = tokenizer.encode("The fox", add_special_tokens=False)
    assert tokenizer.encode("The fox") == [*begin, *inner, *end]


def test_no_space_before_a_text(sentences: Any, tmp_path: Path) -> None:
    fields = sentencepiece_fields(sentences) | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = load_tokenizer(write(tmp_path / "a.gguf", fields))
    ids = tokenizer.encode("fox jumps", add_special_tokens=False)
    names = tokenizer.convert_ids_to_tokens(ids)
    assert names[0] is not None and not names[0].startswith("▁")
    assert tokenizer.decode(ids) == "fox jumps"


def test_merges_of_gemma_4_are_those_of_its_file(tmp_path: Path) -> None:
    original = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    original.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    original.train_from_iterator(TEXT, trainer)
    vocab = original.get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    fields = {
        "general.architecture": "gemma4",
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [3] * 3 + [2] + [6] * 256 + [1] * (len(tokens) - 260),
        "tokenizer.ggml.merges": [
            " ".join(pair) for pair in json.loads(original.to_str())["model"]["merges"]
        ],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = load_tokenizer(write(tmp_path / "a.gguf", fields))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == [2, *original.encode(text).ids], text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_chat_templates(tmp_path: Path) -> None:
    fields = byte_level_fields(trained("gpt-2"), "gpt-2") | {"tokenizer.chat_template": "A"}
    assert load_tokenizer(write(tmp_path / "a.gguf", fields)).chat_template == "A"
    fields |= {"tokenizer.chat_templates": ["tools"], "tokenizer.chat_template.tools": "B"}
    several = load_tokenizer(write(tmp_path / "b.gguf", fields)).chat_template
    assert several == {"default": "A", "tools": "B"}


def test_grammars_use_the_same_tokens(tmp_path: Path) -> None:
    original = trained("llama-bpe")
    path = write(tmp_path / "a.gguf", byte_level_fields(original, "llama-bpe"))
    grammars = load_grammar_tokenizer(path, [2])
    assert grammars.vocab_size == original.get_vocab_size() and grammars.eos_token == 2
    assert grammars.tokenize_str("a quick fox") == original.encode("a quick fox").ids


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"tokenizer.ggml.model": "bert"},
            "tokenizers of the form 'bert' are not read, but 'gpt2', 'llama'",
        ),
        ({"tokenizer.ggml.pre": "odd"}, "tokenizer.ggml.pre 'odd' is not known, but a.x-4.0, chatglm-bpe"),
        ({"tokenizer.ggml.merges": ["a b", "nope"]}, "holds no valid tokenizer"),
        ({"tokenizer.ggml.tokens": "abc"}, "tokenizer.ggml.tokens is of a wrong type"),
    ],
    ids=str,
)
def test_tokenizers_that_cannot_be_read(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    fields = byte_level_fields(trained("gpt-2"), "gpt-2") | change
    with pytest.raises(ValueError, match=words):
        load_tokenizer(write(tmp_path / "a.gguf", fields))


def test_a_file_without_a_tokenizer_and_a_slow_one(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", {"general.architecture": "llama"})
    with pytest.raises(GgufError, match="has no tokenizer; give that of a model folder as `tokenizer`"):
        load_tokenizer(path)
    with pytest.raises(
        ValueError, match="tokenizer_mode='slow' needs the files of a tokenizer of transformers"
    ):
        load_tokenizer(path, "slow")
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ModelNotFoundError, match="its header is cut off"):
        load_tokenizer(path)
