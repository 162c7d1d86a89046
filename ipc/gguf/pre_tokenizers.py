"""How byte-level tokenizers cut a text into words before they merge characters, by llama.cpp's names of the rules.

The names and rules are those of llama.cpp's `llama-vocab.cpp`; here they are steps of a `tokenizer.json`, with the
expressions that the models' own have.
"""

from __future__ import annotations

from typing import Any

Step = dict[str, Any]

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA3 = rf"{ENDINGS}|{WORD}|\p{{N}}{{1,3}}|{SIGNS}|{SPACES}"
QWEN2 = rf"{ENDINGS}|{WORD}|\p{{N}}|{SIGNS}|{SPACES}"
MARKED_WORD, MARKED_SIGNS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
QWEN35 = rf"{ENDINGS}|{MARKED_WORD}|\p{{N}}|{MARKED_SIGNS}|{SPACES}"
CAMEL_START = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+"
CAMEL_CAPITALS = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
PATH_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
TEKKEN = rf"{CAMEL_START}|{CAMEL_CAPITALS}|\p{{N}}|{PATH_SIGNS}|{SPACES}"
GPT4O = rf"{CAMEL_START}{ENDINGS}?|{CAMEL_CAPITALS}{ENDINGS}?|\p{{N}}{{1,3}}|{PATH_SIGNS}|{SPACES}"
CHINESE, KANA = "\u4e00-\u9fa5", "\u3040-\u309f\u30a0-\u30ff"
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}"
)


def split_step(expression: str) -> Step:
    """A step that makes each match of an expression a word."""
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def byte_level(use_regex: bool = False) -> Step:
    """The step that spells bytes as characters; with GPT-2's expression before that, if `use_regex`."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}


DIGITS: Step = {"type": "Digits", "individual_digits": True}

RULES: dict[str, tuple[Step, ...]] = {
    "gpt-2": (byte_level(use_regex=True),),
    "starcoder": (DIGITS, byte_level(use_regex=True)),
    "llama-bpe": (split_step(LLAMA3), byte_level()),
    "qwen2": (split_step(QWEN2), byte_level()),
    "qwen35": (split_step(QWEN35), byte_level()),
    "tekken": (split_step(TEKKEN), byte_level()),
    "gpt-4o": (split_step(GPT4O), byte_level()),
    "deepseek-v3": (
        split_step(r"\p{N}{1,3}"),
        split_step(f"[{CHINESE}{KANA}]+"),
        split_step(DEEPSEEK3),
        byte_level(),
    ),
    "deepseek-coder": (
        split_step(r"[\r\n]"),
        split_step(r"\s?\p{L}+"),
        split_step(r"\s?\p{P}+"),
        split_step("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
        split_step(r"\p{N}"),
        byte_level(),
    ),
    "falcon": (
        split_step(r"[\p{P}\$\+<=>\^~\|`]+"),
        split_step(GPT2),
        split_step("[0-9][0-9][0-9]"),
        byte_level(),
    ),
    "default": (
        split_step(r"[\p{P}\$\+<=>\^~\|]+"),
        split_step(GPT2),
        split_step(r"\p{N}+"),
        split_step("[0-9][0-9][0-9]"),
        byte_level(),
    ),
}
SAME = {
    "gpt-2": ("gpt2", "phi-2", "mpt", "olmo", "jais", "gigachat", "exaone4", "a.x-4.0", "mellum"),
    "starcoder": ("refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"),
    "llama-bpe": (
        "llama3",
        "llama-v3",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "dbrx",
        "smaug-bpe",
        "chatglm-bpe",
        "glm4",
        "lfm2",
    ),
    "qwen2": ("deepseek-r1-qwen", "kormo", "megrez", "stablelm2"),
    "gpt-4o": ("llama4", "kanana2"),
}
NAMES = {name: name for name in RULES} | {name: rule for rule, names in SAME.items() for name in names}
"""The rule in `RULES` of each of llama.cpp's names."""

KEEPS_WORDS = frozenset({"llama-bpe", "tekken"})
"""Rules whose tokenizers take a word that is a token as it is, without looking at merges."""
BEGINS = frozenset({"llama-bpe", "tekken"})
"""Rules whose tokenizers put a token before the text where the file does not say."""
