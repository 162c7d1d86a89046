"""A GGUF file's tokenizer as the files of a Hugging Face model folder: tokenizer.json and tokenizer_config.json.

Two of llama.cpp's forms are read: "gpt2", byte-level BPE with merges, and "llama", SentencePiece's BPE, where
the scores of the tokens say which are merged first.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from pagewire.ipc.gguf.config import CONTROL, USER_DEFINED
from pagewire.ipc.gguf.file import GgufError, GgufFile
from pagewire.ipc.gguf.pre_tokenizers import BEGINS, KEEPS_WORDS, NAMES, RULES

Json = dict[str, Any]
MAX_TOKEN_CHARACTERS = 1024  # of a token that is cut in all ways to find merges
SENTENCEPIECE = ("llama", "gemma4")
"""Forms of tokenizers that spell spaces as a character of their own; Gemma 4's file has a list of its merges."""
NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def tokenizer_json(file: GgufFile) -> bytes:
    """The content that `tokenizer.json` would have.

    Raises:
        GgufError: the file has no tokenizer, or one of a form that is not read; the text names those that are.
    """
    tokens = token_list(file)
    kind = file.get("tokenizer.ggml.model", str, "none")
    if kind not in ("gpt2", *SENTENCEPIECE):
        raise GgufError(
            f"{file.path}: tokenizers of the form {kind!r} are not read, but 'gpt2', 'llama' and 'gemma4'; give "
            "that of a model folder as `tokenizer`"
        )
    parts = byte_level_tokenizer(file, tokens) if kind == "gpt2" else sentencepiece(file, tokens)
    described = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(file, tokens),
        "post_processor": post_processor(file, tokens),
        **parts,
    }
    return msgspec.json.encode(described)


def tokenizer_config(file: GgufFile) -> Json:
    """The content that `tokenizer_config.json` would have: special tokens by name, and chat templates.

    Raises:
        GgufError: a value is of a wrong type.
    """
    tokens = token_list(file)
    config: Json = {name: token for key, name in NAMED.items() if (token := named_token(file, tokens, key))}
    main = file.get("tokenizer.chat_template", str)
    others = {
        name: template
        for name in file.get("tokenizer.chat_templates", list, [])
        if (template := file.get(f"tokenizer.chat_template.{name}", str)) is not None
    }
    if others:
        templates = ({"default": main} if main is not None else {}) | others
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    elif main is not None:
        config["chat_template"] = main
    return config


def token_list(file: GgufFile) -> list[str]:
    """All tokens by id.

    Raises:
        GgufError: there are none.
    """
    tokens: list[str] = file.get("tokenizer.ggml.tokens", list, [])
    if not tokens:
        raise GgufError(f"{file.path} has no tokenizer; give that of a model folder as `tokenizer`")
    return tokens


def named_token(file: GgufFile, tokens: Sequence[str], key: str) -> str | None:
    """A special token by llama.cpp's name: "bos", "eos", "unknown" or "padding"; None if there is none."""
    token_id = file.get(f"tokenizer.ggml.{key}_token_id", int)
    return tokens[token_id] if token_id is not None and 0 <= token_id < len(tokens) else None


def vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """The id of each token; of equal ones, the first."""
    ids: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        ids.setdefault(token, token_id)
    return ids


def rule_of(file: GgufFile) -> str:
    """The rule in `RULES` by which a byte-level tokenizer cuts texts.

    Raises:
        GgufError: an unknown name.
    """
    name = file.get("tokenizer.ggml.pre", str, "default")
    if name not in NAMES:
        raise GgufError(
            f"{file.path}: tokenizer.ggml.pre {name!r} is not known, but {', '.join(sorted(NAMES))}; "
            "give a model folder as `tokenizer`"
        )
    return NAMES[name]


def byte_level_tokenizer(file: GgufFile, tokens: Sequence[str]) -> Json:
    """The parts of a byte-level tokenizer."""
    rule = rule_of(file)
    steps = list(RULES[rule])
    model = {
        "type": "BPE",
        "vocab": vocabulary(tokens),
        "merges": given_merges(file) or [],
        "ignore_merges": rule in KEEPS_WORDS,
    }
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "model": model,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    }


def given_merges(file: GgufFile) -> list[list[str]] | None:
    """The pairs of tokens that are merged, in order; None if the file has no list of them."""
    merges = file.get("tokenizer.ggml.merges", list)
    return None if merges is None else [merge.split(" ", 1) for merge in merges]


def sentencepiece(file: GgufFile, tokens: Sequence[str]) -> Json:
    """The parts of a SentencePiece tokenizer."""
    ids = vocabulary(tokens)
    gemma = file.architecture.startswith("gemma")
    scores: Sequence[float] = file.get("tokenizer.ggml.scores", array, ())
    if gemma or len(scores) != len(tokens):  # what Gemma's scores say is not the order of its merges
        scores = range(0, -len(tokens), -1)
    model = {
        "type": "BPE",
        "vocab": ids,
        "merges": merges_by_score(tokens, ids, scores) if (given := given_merges(file)) is None else given,
        "unk_token": named_token(file, tokens, "unknown"),
        "fuse_unk": True,
        "byte_fallback": True,
    }
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool, not gemma)
    return {"model": model, **spaces(file.architecture, prefix)}


def spaces(architecture: str, prefix: bool) -> Json:
    """How a SentencePiece tokenizer spells spaces; prefix: it puts one before a text.

    Phi's puts one before a text that begins with a space, too.
    """
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    steps: list[Json] = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if not prefix:
        return {
            "normalizer": replaced,
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": steps},
        }
    steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    decoder = {"type": "Sequence", "decoders": steps}
    if architecture == "phi3":
        both = [{"type": "Prepend", "prepend": "\u2581"}, replaced]
        return {
            "normalizer": {"type": "Sequence", "normalizers": both},
            "pre_tokenizer": None,
            "decoder": decoder,
        }
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    return {"normalizer": None, "pre_tokenizer": metaspace, "decoder": decoder}


def merges_by_score(
    tokens: Sequence[str], ids: dict[str, int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """All ways in which two tokens make a third, in the order in which SentencePiece would use them.

    That is by the score of the third; of equal ones, those with the longer left part come first.
    """
    found = []
    for token, score in zip(tokens, scores, strict=True):
        if len(token) > MAX_TOKEN_CHARACTERS:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-score, -cut, cut - len(token), left, right))
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in found]


def added_tokens(file: GgufFile, tokens: Sequence[str]) -> list[Json]:
    """Tokens that are found in a text before all others: control tokens, which are special, and users' own."""
    kinds = file.get("tokenizer.ggml.token_type", array, ())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    ids = vocabulary(tokens)
    return [
        {"id": token_id, "content": token, "special": kind == CONTROL, **plain}
        for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (CONTROL, USER_DEFINED) and token and ids[token] == token_id
    ]


def post_processor(file: GgufFile, tokens: Sequence[str]) -> Json | None:
    """The step that puts special tokens around a text; None if there are none to put."""
    is_sentencepiece = file.get("tokenizer.ggml.model", str) in SENTENCEPIECE
    begins = is_sentencepiece or rule_of(file) in BEGINS
    around: list[list[Json]] = [[], []]
    special = {}
    for place, (key, default) in enumerate((("bos", begins), ("eos", False))):
        token = named_token(file, tokens, key)
        if token is not None and file.get(f"tokenizer.ggml.add_{key}_token", bool, default):
            token_id = file.get(f"tokenizer.ggml.{key}_token_id", int)
            around[place] = [{"SpecialToken": {"id": token, "type_id": 0}}]
            special[token] = {"id": token, "ids": [token_id], "tokens": [token]}
    if not special:
        return None
    first, second = ([*around[0], {"Sequence": {"id": name, "type_id": 0}}, *around[1]] for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": first + second,
        "special_tokens": special,
    }
