"""Tokenizers: conversion of text to token ids and back.

A folder with a `tokenizer.json` needs only the `tokenizers` library, which loads in a tenth of a second; what
transformers adds to that file (special tokens, chat templates, clean-up) is read here in the same way as
transformers 5 does. Other folders, and `tokenizer_mode="slow"`, use the tokenizer of transformers itself.
"""

from __future__ import annotations

import json
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers

from pagewire.frontend import wiring
from pagewire.frontend.text.proportion import check_proportion
from pagewire.frontend.text.segments import SegmentCache, TextCuts
from pagewire.ipc.files.hub import check_files, model_folder, read_file, read_json
from pagewire.ipc.gguf.file import is_gguf, read_metadata

logger = logging.getLogger("pagewire.frontend")

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LONG_TEXT = 4096  # characters, from which a text is tokenized without holding up other threads
# Characters, from which texts are tokenized one after the other: each takes hundreds of bytes of memory for a
# character, and several would take all processors from whatever else runs here.
LARGE_TEXT = 1 << 15
CLEAN_UP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


class Tokenizer(ABC):
    """The tokenizer interface of the frontend.

    Attributes:
        vocab_size: number of token ids, including added tokens.
        eos_token_id, bos_token_id: ids of these special tokens; None if there is no such token.
        special_ids: ids that `skip_special_tokens` removes from text.
        special_tokens: text of special tokens by name ("bos_token", ...), for chat templates.
        chat_template: the template, or several by name, or None.
        response_template: the checkpoint's description of replies, or None.
        decoder: the decoder as in `tokenizer.json`; None if text can only be obtained by calling `decode`.
        cleans_up: `decode` removes spaces before punctuation, as `clean_up` does.
        original: the wrapped object of tokenizers or transformers.
        pieces: cache of `detokenize.Pieces`.
        name_or_path: from which it was loaded; empty if it was not.
    """

    vocab_size: int
    eos_token_id: int | None
    bos_token_id: int | None
    special_ids: frozenset[int]
    special_tokens: dict[str, str]
    chat_template: str | dict[str, str] | None
    response_template: Any = None
    decoder: dict[str, Any] | None = None
    cleans_up: bool = False
    original: Any
    pieces: Any = None
    name_or_path: str = ""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, with the model's special tokens around it if `add_special_tokens`."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_turn(self, text: str, add_special_tokens: bool = True, salt: str | None = None) -> list[int]:
        """Return the same as `encode`, sooner for a text of which much was tokenized lately for the current tenant.

        salt: the prompt's cache salt: what has another one counts as new.
        """
        return self.encode(text, add_special_tokens)

    @abstractmethod
    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text."""

    @abstractmethod
    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Return the text of the tokens. Fast tokenizers ignore `spaces_between_special_tokens`."""

    @abstractmethod
    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str | None]:
        """Return the name of each token in the vocabulary; None for an unknown id."""

    def __len__(self) -> int:
        return self.vocab_size


class FastTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library.

    original: the library's tokenizer; truncation and padding are turned off, so it must not be shared.
    special_tokens, chat_template and others: what `tokenizer.json` does not contain.
    """

    def __init__(
        self,
        original: tokenizers.Tokenizer,
        special_tokens: dict[str, str] | None = None,
        chat_template: str | dict[str, str] | None = None,
        clean_up: bool = False,
        extra_special_tokens: Sequence[str] = (),
        response_template: Any = None,
    ) -> None:
        check_proportion(original)
        original.no_truncation()
        original.no_padding()
        self.original = original
        self.special_tokens = special_tokens or {}
        self.extra_special_tokens = extra_special_tokens
        self.chat_template, self.response_template = chat_template, response_template
        self.cleans_up = clean_up
        self.decoder = read_decoder(original.decoder)
        self.vocab_size = original.get_vocab_size(with_added_tokens=True)
        self._large = threading.Lock()
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        added = original.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        token_id: int | None = self.original.token_to_id(token) if token else None
        return token_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if (
            len(text) > LONG_TEXT
        ):  # the library's `encode` holds the interpreter's lock, `encode_batch` does not
            with self._large if len(text) >= LARGE_TEXT else nullcontext():
                return self.encode_batch([text], add_special_tokens)[0]
        ids: list[int] = self.original.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_turn(self, text: str, add_special_tokens: bool = True, salt: str | None = None) -> list[int]:
        ids = None
        if len(text) > LONG_TEXT:
            ids = self._segments.encode(text, self._encode_part, add_special_tokens, salt)
        return self.encode(text, add_special_tokens) if ids is None else ids

    @cached_property
    def _segments(self) -> SegmentCache:
        template = self.chat_template or ""
        templates = [template] if isinstance(template, str) else template.values()
        return SegmentCache(TextCuts(self.original, " ".join((*templates, *self.special_tokens.values()))))

    def _encode_part(self, part: str) -> list[int]:
        # Without the interpreter's lock, however short it is: there may be many.
        return self.encode(part, False) if len(part) >= LARGE_TEXT else self.encode_batch([part], False)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        # The fast form leaves out offsets, which are not used: it takes a third of the time, and less memory.
        encodings = self.original.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        text: str = self.original.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return clean_up(text) if self.cleans_up else text

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str | None]:
        return [self.original.id_to_token(token_id) for token_id in token_ids]


class WrappedTokenizer(Tokenizer):
    """A tokenizer of the transformers library."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.vocab_size = len(original)
        self.bos_token_id = original.bos_token_id
        self.eos_token_id = original.eos_token_id
        added = getattr(original, "added_tokens_decoder", {})
        special = {token_id for token_id, token in added.items() if token.special}
        backend = getattr(original, "backend_tokenizer", None)
        if isinstance(backend, tokenizers.Tokenizer):
            check_proportion(backend)
        if isinstance(backend, tokenizers.Tokenizer) and is_plain(original):
            self.decoder = read_decoder(backend.decoder)
            self.cleans_up = wants_clean_up(vars(original), backend)
        else:
            special |= set(original.all_special_ids)
        self.special_ids = frozenset(special)
        self.special_tokens = dict(original.special_tokens_map)
        self.chat_template = getattr(original, "chat_template", None)
        self.response_template = getattr(original, "response_template", None)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [
            list(self.original.encode(text, add_special_tokens=add_special_tokens, truncation=False))
            for text in texts
        ]

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        text: str = self.original.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        return text

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str | None]:
        return list(self.original.convert_ids_to_tokens(list(token_ids)))


def is_plain(tokenizer: Any) -> bool:
    """Return True if a tokenizer of transformers uses the decoding of its base class."""
    return bool(type(tokenizer)._decode.__qualname__ == "TokenizersBackend._decode")


def load_tokenizer(
    name: str | Path,
    mode: str = "auto",
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
    cache_dir: str | None = None,
) -> Tokenizer:
    """Load the tokenizer of a folder, a GGUF file, a hub repository, or an embedded model.

    mode: "auto" or "slow". "slow" uses the tokenizer of transformers; so does "auto" if there is no
        `tokenizer.json`.
    trust_remote_code: run the Python code in the folder if transformers has no tokenizer for it. Otherwise the
        folder, which a core may have named, is only read: no code, no pickles, no file over `hub.MAX_FILE_BYTES`.

    Raises:
        ModelNotFoundError: there is no such folder or repository. ValueError: it has no valid tokenizer.
    """
    folder = model_folder(
        str(name),
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        tokenizer_only=True,
        trust_remote_code=trust_remote_code,
    )
    if is_gguf(folder):
        tokenizer: Tokenizer = load_gguf(folder, mode)
    else:
        tokenizer = load_folder(folder, mode, trust_remote_code)
    tokenizer.name_or_path = str(name)
    return tokenizer


def load_folder(folder: Path, mode: str, trust_remote_code: bool) -> Tokenizer:
    """Load the tokenizer of a folder; see `load_tokenizer`."""
    config = read_json(folder / "tokenizer_config.json")
    if mode == "slow" or not (folder / "tokenizer.json").is_file():
        return load_wrapped(folder, config, trust_remote_code)
    if "auto_map" in config:
        logger.info("the tokenizer is that of tokenizer.json: the code of its repository does not run")
    return load_fast(folder, config)


def as_tokenizer(tokenizer: Any) -> Tokenizer:
    """Wrap a tokenizer of transformers or tokenizers; a `Tokenizer` is returned unchanged.

    Raises:
        TypeError: the object is not a tokenizer.
    """
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if isinstance(tokenizer, tokenizers.Tokenizer):
        return FastTokenizer(tokenizers.Tokenizer.from_str(tokenizer.to_str()))
    if not all(hasattr(tokenizer, name) for name in ("encode", "decode", "special_tokens_map")):
        raise TypeError(f"not a tokenizer: {type(tokenizer).__name__}")
    return WrappedTokenizer(tokenizer)


def load_fast(folder: Path, config: dict[str, Any]) -> FastTokenizer:
    """Load `tokenizer.json`, completed by the configuration files in the same folder.

    Raises:
        ValueError: the file is not a tokenizer.
    """
    try:
        backend = tokenizers.Tokenizer.from_buffer(read_file(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{folder / 'tokenizer.json'} is not a tokenizer: {error}") from error
    if is_llama(folder, config, backend):
        use_llama_spaces(backend, config)
    declared = declared_tokens(folder, config)
    if "added_tokens_decoder" not in config:  # otherwise this older file is ignored
        config = config | read_json(folder / "special_tokens_map.json")
    named, extra = special_tokens(config)
    add_missing(backend, declared, named, extra)
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    return FastTokenizer(
        backend,
        {name: str(token) for name, token in named.items()},
        read_chat_template(folder, config),
        wants_clean_up(config, backend),
        [str(token) for token in extra],
        config.get("response_template"),
    )


def load_gguf(path: Path, mode: str) -> FastTokenizer:
    """Load the tokenizer of a GGUF file.

    Raises:
        ModelNotFoundError: the file is broken. ValueError: it has no tokenizer that can be read, or mode is "slow".
    """
    if mode == "slow":
        raise ValueError(
            f"tokenizer_mode='slow' needs the files of a tokenizer of transformers, which {path} does not hold; "
            "leave it out, or give a model folder as `tokenizer`"
        )
    file = read_metadata(path)
    config, described = wiring.tokenizer_config(file), wiring.tokenizer_json(file)
    try:
        backend = tokenizers.Tokenizer.from_buffer(described)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} holds no valid tokenizer: {error}") from error
    named, _ = special_tokens(config)
    return FastTokenizer(
        backend,
        {name: str(token) for name, token in named.items()},
        chat_templates(config.get("chat_template")),
    )


def is_llama(folder: Path, config: dict[str, Any], backend: tokenizers.Tokenizer) -> bool:
    """Return True if transformers loads the folder as a `LlamaTokenizer`, which has its own treatment of spaces."""
    name = config.get("tokenizer_class") or ""
    own = name.removesuffix("Fast") == "LlamaTokenizer" and type(backend.model).__name__ == "BPE"
    if not own or type(backend.decoder).__name__ == "ByteLevel":
        return False
    return read_json(folder / "config.json").get("model_type") in (None, "llama")


def use_llama_spaces(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Treat spaces as `LlamaTokenizer` of transformers 5 does, which overrides `tokenizer.json`.

    It adds a space before the text, but (unless `legacy`) not after a special token.
    """
    prefix = config.get("add_prefix_space") in (None, True)
    scheme = ("always" if config.get("legacy") else "first") if prefix else "never"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])


def load_wrapped(folder: Path, config: dict[str, Any], trust_remote_code: bool) -> WrappedTokenizer:
    """Load a folder's tokenizer with transformers: by its own class if `config` names one of these, else by code.

    config: the content of tokenizer_config.json.

    Raises:
        ValueError: transformers cannot load it, or a file is too large.
    """
    from transformers import AutoTokenizer  # the import takes seconds
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    check_files(folder)
    try:
        name = config.get("tokenizer_class")
        own_code = trust_remote_code and not (isinstance(name, str) and tokenizer_class_from_name(name))
        if "auto_map" in config:
            logger.info(
                "the tokenizer is %s",
                "made by the code of its repository (trust_remote_code): transformers has none for it"
                if own_code
                else "transformers' own: the code of its repository does not run",
            )
        return WrappedTokenizer(
            AutoTokenizer.from_pretrained(folder, use_fast=False, trust_remote_code=own_code)
        )
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        raise ValueError(f"no tokenizer could be loaded from {folder}: {error}") from error


def declared_tokens(folder: Path, config: dict[str, Any]) -> list[AddedToken]:
    """Return the added tokens that the other files of the folder declare, in the order of their ids."""
    if "added_tokens_decoder" in config:
        items = sorted(config["added_tokens_decoder"].items(), key=lambda item: int(item[0]))
        return [as_added_token(token) for _, token in items]
    older = read_json(folder / "added_tokens.json")
    config = config | read_json(folder / "special_tokens_map.json")
    named, extra = special_tokens(config)
    special = {str(token) for token in [*named.values(), *extra]}
    return [
        AddedToken(text, normalized=text not in special, special=text in special)
        for text, _ in sorted(older.items(), key=lambda item: item[1])
    ]


def special_tokens(config: dict[str, Any]) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """Return a config's special tokens: those by name ("eos_token" or any "..._token"), and additional ones."""
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    named = {
        name: as_added_token(token)
        for name, token in config.items()
        if (name in NAMED_TOKENS and token) or (name.endswith("_token") and isinstance(token, str))
    }
    if isinstance(more, dict):
        return named | {name: as_added_token(token) for name, token in more.items()}, []
    return named, [as_added_token(token) for token in more]


def as_added_token(token: Any) -> AddedToken:
    """Create an added token from its JSON: text, or a dict of its properties."""
    if isinstance(token, str):
        return AddedToken(token, special=True, normalized=False)
    return AddedToken(**{name: value for name, value in token.items() if name != "__type"})


def add_missing(
    backend: tokenizers.Tokenizer,
    declared: list[AddedToken],
    named: dict[str, AddedToken],
    extra: list[AddedToken],
) -> None:
    """Add declared tokens that are missing or have other properties, then special tokens that are missing."""
    present = backend.get_added_tokens_decoder().values()
    properties = {repr(token) for token in present}
    to_add = [token for token in declared if repr(token) not in properties]
    known = {token.content for token in [*present, *to_add]}
    special = {token.content for token in named.values()}
    for token in to_add:
        token.special = token.special or token.content in special
    for token in [*named.values(), *extra]:
        if token.content not in known:
            known.add(token.content)
            token.special = True
            to_add.append(token)
    if to_add:
        backend.add_tokens(to_add)


def wants_clean_up(config: dict[str, Any], backend: tokenizers.Tokenizer) -> bool:
    """Return True if decoded text is cleaned up. BPE needs a separate flag, since clean-up corrupts its text."""
    if type(backend.model).__name__ == "BPE":
        name = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        return bool(config.get("clean_up_tokenization_spaces") and config.get(name))
    return bool(config.get("clean_up_tokenization_spaces", False))


def clean_up(text: str) -> str:
    """Remove spaces before English punctuation and contractions."""
    for ugly, clean in CLEAN_UP:
        text = text.replace(ugly, clean)
    return text


def read_chat_template(folder: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """Return a folder's chat template, or several by name; template files override `tokenizer_config.json`."""
    templates = {
        path.stem: read_file(path).decode()
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    if (main := folder / "chat_template.jinja").is_file():
        templates["default"] = read_file(main).decode()
    if templates:
        return templates["default"] if list(templates) == ["default"] else templates
    return chat_templates(
        config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    )


def chat_templates(template: Any) -> str | dict[str, str] | None:
    """A chat template, or several by name, as `tokenizer_config.json` has them."""
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return template  # type: ignore[no-any-return]


def read_decoder(decoder: Any) -> dict[str, Any]:
    """Return a decoder of the tokenizers library as JSON; without a decoder, names are joined by spaces."""
    if decoder is None:
        return {"type": "Join"}
    described: dict[str, Any] = json.loads(decoder.__getstate__())
    return described


@lru_cache(maxsize=1)
def byte_of_char() -> dict[str, int]:
    """Return the byte that each character represents in the names of byte-level tokens.

    Printable Latin-1 characters represent themselves; the other bytes are represented by characters from U+0100 on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
