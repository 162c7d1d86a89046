"""Tokenizers whose rules multiply texts are refused when they are loaded."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, processors

import pagewire.demo
from pagewire.frontend.text.proportion import check_proportion, factor_of
from pagewire.frontend.text.tokenizer import load_tokenizer

# The kinds of rules, by what bounds them: Unicode or taking away; or `factor_of`.
FLAT = {
    "BertNormalizer",
    "ByteLevel",
    "Lowercase",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Nmt",
    "Strip",
    "StripAccents",
}
COUNTED = {"Precompiled", "Prepend", "Replace", "Sequence"}
FLAT_DECODERS = {"BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Strip", "WordPiece"}
FLAT_PROCESSORS = {"BertProcessing", "ByteLevel", "RobertaProcessing"}


def tokenizer(**parts: Any) -> Tokenizer:
    made = Tokenizer(models.WordLevel({"a": 0, "[x]": 1}, unk_token="a"))
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def charsmap(*texts: bytes) -> str:
    return base64.b64encode((8).to_bytes(4, "little") + bytes(8) + b"\0".join(texts)).decode()


def kinds(module: Any, base: str) -> set[str]:
    """The names of a module's classes of one base."""
    kind = getattr(module, base)
    return {
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, kind) and value is not kind
    }


def test_each_kind_of_rule_is_known() -> None:
    """A new version of the library may have more: say of each how much it multiplies."""
    assert kinds(normalizers, "Normalizer") == FLAT | COUNTED
    assert kinds(decoders, "Decoder") == FLAT_DECODERS | {"Replace", "Sequence"}
    assert kinds(processors, "PostProcessor") == FLAT_PROCESSORS | {"Sequence", "TemplateProcessing"}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("normalizer", normalizers.Sequence([normalizers.Replace("a", "aa")] * 7)),
        (
            "normalizer",
            normalizers.Sequence([normalizers.Sequence([normalizers.Replace("a", "aa")] * 4)] * 2),
        ),
        ("normalizer", normalizers.Replace("a", "b" * 65)),
        ("normalizer", normalizers.Sequence([normalizers.Replace(Regex("x*"), "a")] * 7)),
        ("normalizer", normalizers.Prepend("a" * 64)),
        ("decoder", decoders.Sequence([decoders.Replace("a", "aaaa")] * 4)),
        ("post_processor", processors.TemplateProcessing(single=" ".join(["$A"] * 65), special_tokens=[])),
        (
            "post_processor",
            processors.TemplateProcessing(single="[x] " * 5000 + "$A", special_tokens=[("[x]", 1)]),
        ),
    ],
)
def test_rules_that_multiply_are_refused(name: str, part: Any, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    tokenizer(**{name: part}).save(str(file))
    with pytest.raises(ValueError, match=f"the tokenizer's {name} can make a text .* times as long"):
        load_tokenizer(str(tmp_path))


def test_the_factor_is_no_less_than_what_the_library_makes() -> None:
    rules = [
        normalizers.Replace("a", "bcd"),
        normalizers.Replace("aa", "bcd"),
        normalizers.Replace("", "b"),
        normalizers.Replace(Regex("x*"), "bc"),
        normalizers.Replace(Regex("(?=a)"), "bc"),
        normalizers.Sequence([normalizers.Replace("a", "aa"), normalizers.Replace("a", "aaa")]),
        normalizers.Prepend("bcd"),
    ]
    for rule in rules:
        state = rule.__getstate__()
        factor = factor_of(json.loads(state))
        for length in (1, 10, 100):
            made = len(rule.normalize_str("a" * length))
            assert made <= factor * length + factor, state


def test_tables_of_sentencepiece_are_counted_by_their_longest_text() -> None:
    for texts, factor in (((b"a", "\u0635".encode() * 18, b"b"), 1), ((b"a", b"b" * 19), 19), ((), 1)):
        assert factor_of({"type": "Precompiled", "precompiled_charsmap": charsmap(*texts)}) == factor


def test_tokenizers_as_they_are_pass() -> None:
    space = normalizers.Replace(Regex(" {2,}"), " ")
    for rules in (
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")],
        [
            normalizers.Replace("``", '"'),
            normalizers.NFKD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            space,
        ],
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()],
    ):
        check_proportion(tokenizer(normalizer=normalizers.Sequence(rules)))
    load_tokenizer(str(Path(pagewire.demo.__file__).parent))
