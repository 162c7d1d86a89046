"""Text to token ids and back.

A folder with a `tokenizer.json` needs only the `tokenizers` library, which loads in a tenth of a second; what
transformers adds to that file (special tokens, chat templates, clean-up) is read here the way transformers 5
reads it. Other folders, and `tokenizer_mode="slow"`, take the tokenizer of transformers itself.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers

from pagewire.ipc.hub import model_folder, read_json

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
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
    """What the frontend needs of a tokenizer.

    Attributes:
        vocab_size: number of ids, added tokens included.
        eos_token_id, bos_token_id: None where there is none.
        special_ids: ids that `skip_special_tokens` leaves out of text.
        special_tokens: "bos_token" and the like to their text, as chat templates see them.
        chat_template: the template, or several by name, or None.
        decoder: how names of tokens become text, in the words of `tokenizer.json`; None if only `decode` knows.
        cleans_up: `decode` takes spaces before punctuation out of the text, as `clean_up` does.
        original: the object that does the work, of tokenizers or transformers.
        pieces: what `detokenize` keeps of the vocabulary.
    """

    vocab_size: int
    eos_token_id: int | None
    bos_token_id: int | None
    special_ids: frozenset[int]
    special_tokens: dict[str, str]
    chat_template: str | dict[str, str] | None
    decoder: dict[str, Any] | None = None
    cleans_up: bool = False
    original: Any
    pieces: Any = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with `add_special_tokens`, also those that the model wants around it."""
        return self.encode_batch([text], add_special_tokens)[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text."""

    @abstractmethod
    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Text of the tokens. Fast tokenizers put no spaces between special tokens, whatever is asked."""

    @abstractmethod
    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str | None]:
        """The vocabulary's name of each token; None for an id that has none."""

    def __len__(self) -> int:
        return self.vocab_size


class FastTokenizer(Tokenizer):
    """On top of the `tokenizers` library.

    original: the library's tokenizer, which is ours alone: without truncation and padding.
    special_tokens, chat_template, clean_up: what `tokenizer.json` does not tell.
    """

    def __init__(
        self,
        original: tokenizers.Tokenizer,
        special_tokens: dict[str, str] | None = None,
        chat_template: str | dict[str, str] | None = None,
        clean_up: bool = False,
    ) -> None:
        original.no_truncation()
        original.no_padding()
        self.original = original
        self.special_tokens = special_tokens or {}
        self.chat_template = chat_template
        self.cleans_up = clean_up
        self.decoder = read_decoder(original.decoder)
        self.vocab_size = original.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        added = original.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        token_id: int | None = self.original.token_to_id(token) if token else None
        return token_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.original.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        encodings = self.original.encode_batch(list(texts), add_special_tokens=add_special_tokens)
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
    """A tokenizer of transformers, whatever it is made of."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.vocab_size = len(original)
        self.bos_token_id = original.bos_token_id
        self.eos_token_id = original.eos_token_id
        added = getattr(original, "added_tokens_decoder", {})
        special = {token_id for token_id, token in added.items() if token.special}
        backend = getattr(original, "backend_tokenizer", None)
        if isinstance(backend, tokenizers.Tokenizer) and is_plain(original):
            self.decoder = read_decoder(backend.decoder)
            self.cleans_up = wants_clean_up(vars(original), backend)
        else:
            special |= set(original.all_special_ids)
        self.special_ids = frozenset(special)
        self.special_tokens = dict(original.special_tokens_map)
        self.chat_template = getattr(original, "chat_template", None)

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
    """True if a tokenizer of transformers decodes as its base class does."""
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
    """The tokenizer of a folder, of a hub repository, or of the embedded model ("demo").

    mode: "auto", or "slow" for the one of transformers, which is also taken where there is no `tokenizer.json`
        or where the folder brings code of its own that is trusted.

    Raises:
        ModelNotFoundError: no such folder or repository. ValueError: it holds no tokenizer, or a bad one.
    """
    folder = model_folder(str(name), revision=revision, token=token, cache_dir=cache_dir, tokenizer_only=True)
    config = read_json(folder / "tokenizer_config.json")
    own_code = trust_remote_code and "auto_map" in config
    if mode == "slow" or own_code or not (folder / "tokenizer.json").is_file():
        return load_wrapped(folder, trust_remote_code)
    return load_fast(folder, config)


def as_tokenizer(tokenizer: Any) -> Tokenizer:
    """Ours, from ours or from a tokenizer of transformers or tokenizers.

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if isinstance(tokenizer, tokenizers.Tokenizer):
        return FastTokenizer(tokenizers.Tokenizer.from_str(tokenizer.to_str()))
    if not all(hasattr(tokenizer, name) for name in ("encode", "decode", "special_tokens_map")):
        raise TypeError(f"not a tokenizer: {type(tokenizer).__name__}")
    return WrappedTokenizer(tokenizer)


def load_fast(folder: Path, config: dict[str, Any]) -> FastTokenizer:
    """The tokenizer of `tokenizer.json`, completed by what lies beside it.

    Raises:
        ValueError: the file is not a tokenizer.
    """
    try:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{folder / 'tokenizer.json'} is not a tokenizer: {error}") from error
    if is_llama(folder, config, backend):
        use_llama_spaces(backend, config)
    declared = declared_tokens(folder, config)
    if "added_tokens_decoder" not in config:  # then this older file is valid
        config = config | read_json(folder / "special_tokens_map.json")
    named, extra = special_tokens(config)
    add_missing(backend, declared, named, extra)
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    return FastTokenizer(
        backend,
        {name: str(token) for name, token in named.items()},
        read_chat_template(folder, config),
        wants_clean_up(config, backend),
    )


def is_llama(folder: Path, config: dict[str, Any], backend: tokenizers.Tokenizer) -> bool:
    """True if transformers makes a `LlamaTokenizer` of the folder, which has its own way with spaces."""
    name = config.get("tokenizer_class") or ""
    own = name.removesuffix("Fast") == "LlamaTokenizer" and type(backend.model).__name__ == "BPE"
    if not own or type(backend.decoder).__name__ == "ByteLevel":
        return False
    return read_json(folder / "config.json").get("model_type") in (None, "llama")


def use_llama_spaces(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Spaces as `LlamaTokenizer` of transformers 5 treats them, whatever `tokenizer.json` says.

    It puts a space before the text, but (unless `legacy`) not before what follows a special token.
    """
    prefix = config.get("add_prefix_space") in (None, True)
    scheme = ("always" if config.get("legacy") else "first") if prefix else "never"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])


def load_wrapped(folder: Path, trust_remote_code: bool) -> WrappedTokenizer:
    """The tokenizer that transformers makes of a folder.

    Raises:
        ValueError: it cannot make one.
    """
    from transformers import AutoTokenizer  # takes seconds: only where nothing else will do

    try:
        return WrappedTokenizer(
            AutoTokenizer.from_pretrained(folder, use_fast=False, trust_remote_code=trust_remote_code)
        )
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        raise ValueError(f"no tokenizer could be loaded from {folder}: {error}") from error


def declared_tokens(folder: Path, config: dict[str, Any]) -> list[AddedToken]:
    """Added tokens that files beside `tokenizer.json` declare, in the order of their ids."""
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
    """The special tokens that a config names ("eos_token", or any other "..._token"), and its further ones."""
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
    """An added token from its JSON: text, or a dict of its properties."""
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
    """True if decoded text is cleaned up; for BPE that would corrupt it, so it takes a flag of its own."""
    if type(backend.model).__name__ == "BPE":
        name = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        return bool(config.get("clean_up_tokenization_spaces") and config.get(name))
    return bool(config.get("clean_up_tokenization_spaces", False))


def clean_up(text: str) -> str:
    """Take out the spaces that English does not have before punctuation."""
    for ugly, clean in CLEAN_UP:
        text = text.replace(ugly, clean)
    return text


def read_chat_template(folder: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """The chat template(s): files of their own come before `tokenizer_config.json`."""
    templates = {
        path.stem: path.read_text(encoding="utf-8")
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    if (main := folder / "chat_template.jinja").is_file():
        templates["default"] = main.read_text(encoding="utf-8")
    if templates:
        return templates["default"] if list(templates) == ["default"] else templates
    template = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return template


def read_decoder(decoder: Any) -> dict[str, Any]:
    """The JSON of a decoder of the tokenizers library; without one, names are joined by spaces."""
    if decoder is None:
        return {"type": "Join"}
    described: dict[str, Any] = json.loads(decoder.__getstate__())
    return described


@lru_cache(maxsize=1)
def byte_of_char() -> dict[str, int]:
    """The byte that each character stands for in the names of byte-level tokens.

    Printable characters of Latin-1 stand for themselves, the other bytes for characters from U+0100 on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
