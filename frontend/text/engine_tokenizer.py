"""The tokenizer that programs get from an engine: the frontend's, with the usual members of transformers'."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from pagewire.frontend import wiring
from pagewire.frontend.text.tokenizer import (
    NAMED_TOKENS,
    FastTokenizer,
    Tokenizer,
    WrappedTokenizer,
    as_tokenizer,
)


def for_programs(tokenizer: Tokenizer | None) -> Any:
    """Return a tokenizer as programs get it; None stays None.

    An `EngineTokenizer`, or, if the frontend uses a tokenizer of transformers, that one.
    """
    if isinstance(tokenizer, FastTokenizer):
        return EngineTokenizer(tokenizer)
    return tokenizer.original if isinstance(tokenizer, WrappedTokenizer) else tokenizer


def from_programs(tokenizer: Any) -> Tokenizer:
    """Return the tokenizer that a program gives, as the frontend uses it.

    Raises:
        TypeError: the object is not a tokenizer.
    """
    return tokenizer.tokenizer if isinstance(tokenizer, EngineTokenizer) else as_tokenizer(tokenizer)


class TokenizedText(dict[str, Any]):
    """The encoding of a text or of several: `input_ids` and `attention_mask`, also as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"an encoded text has {' and '.join(self)}, not {name!r}")
        return self[name]


class EngineTokenizer:
    """An engine's tokenizer. Its members are those of transformers' tokenizers, with the same results.

    It has the usual ones; an error says of others how to get a tokenizer that has all.

    Attributes:
        name_or_path: the folder, GGUF file or repository that it was loaded from.
        special_tokens_map: text of special tokens by name; `eos_token` and the like are its entries, None without.
        extra_special_tokens: those without a name.
        chat_template: the template, or several by name, or None.
        is_fast: True.
    """

    is_fast = True

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self.tokenizer = tokenizer
        self.name_or_path = tokenizer.name_or_path
        order = {name: place for place, name in enumerate(NAMED_TOKENS)}
        named = sorted(tokenizer.special_tokens.items(), key=lambda item: order.get(item[0], len(order)))
        self.special_tokens_map = dict(named)
        self.extra_special_tokens = list(tokenizer.extra_special_tokens)
        self.chat_template: Any = tokenizer.chat_template

    def __getattr__(self, name: str) -> Any:
        """A special token, or the id of one.

        Raises:
            AttributeError: any other name; the text says how to get a tokenizer that has it.
        """
        if name.startswith("_"):  # asked for by `copy`, before there is anything
            raise AttributeError(name)
        token = name.removesuffix("_id")
        if token not in (*NAMED_TOKENS, *self.special_tokens_map):
            raise AttributeError(f"an engine's tokenizer has no {name!r}{self._remedy()} it")
        if token == name:
            return self.special_tokens_map.get(name)
        text = getattr(self, token)
        return None if text is None else self.convert_tokens_to_ids(text)

    def _remedy(self) -> str:
        path = PurePath(self.name_or_path)
        arguments = repr(self.name_or_path)
        if path.suffix == ".gguf":
            arguments = f"{str(path.parent)!r}, gguf_file={path.name!r}"
        return f": transformers.AutoTokenizer.from_pretrained({arguments}) makes a tokenizer that has"

    def __len__(self) -> int:
        return self.tokenizer.vocab_size

    def __bool__(self) -> bool:
        return True

    @property
    def vocab_size(self) -> int:
        """The number of tokens without added ones; `len` of the tokenizer has these, too."""
        size: int = self.tokenizer.original.get_vocab_size(with_added_tokens=False)
        return size

    @property
    def all_special_tokens(self) -> list[str]:
        """The special tokens that have a name, then the others, each once."""
        return list(dict.fromkeys([*self.special_tokens_map.values(), *self.extra_special_tokens]))

    @property
    def all_special_ids(self) -> list[int | None]:
        """The ids of `all_special_tokens`."""
        return self._ids(self.all_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens, added ones included."""
        vocabulary: dict[str, int] = self.tokenizer.original.get_vocab(with_added_tokens=True)
        return vocabulary

    def get_added_vocab(self) -> dict[str, int]:
        """Return the ids of the added tokens."""
        added = self.tokenizer.original.get_added_tokens_decoder()
        return {added[token_id].content: token_id for token_id in sorted(added)}

    def __call__(
        self, text: str | Sequence[str], add_special_tokens: bool = True, **options: Any
    ) -> TokenizedText:
        """Return the token ids of a text or of several, as `input_ids`, beside an `attention_mask` of ones.

        Raises:
            TypeError: there are further options, such as `padding`; the text says what takes them.
        """
        if options:
            raise TypeError(f"an engine's tokenizer takes no {', '.join(options)}{self._remedy()} them")
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return TokenizedText(input_ids=ids, attention_mask=[1] * len(ids))
        batch = self.encode_batch(text, add_special_tokens)
        return TokenizedText(input_ids=batch, attention_mask=[[1] * len(ids) for ids in batch])

    def encode(
        self, text: str | None = None, add_special_tokens: bool = True, *, prompt: str | None = None
    ) -> list[int]:
        """Return the token ids of a text. prompt: another name of `text`, as tokenizer groups of vLLM have it.

        Raises:
            TypeError: both are given, or none.
        """
        given = text if prompt is None else prompt
        if given is None or (text is not None and prompt is not None):
            raise TypeError("encode takes one text, as `text` or as `prompt`")
        return self.tokenizer.encode(given, add_special_tokens)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text."""
        return self.tokenizer.encode_batch(texts, add_special_tokens)

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """Return the names of a text's tokens in the vocabulary."""
        tokens: list[str] = self.tokenizer.original.encode(text, add_special_tokens=add_special_tokens).tokens
        return tokens

    def decode(
        self, token_ids: Any, skip_special_tokens: bool = False, spaces_between_special_tokens: bool = True
    ) -> Any:
        """Return the text of a token or of several, or the texts of a batch of them.

        token_ids: an integer, a sequence, or a batch of sequences; also an array or a tensor.
        spaces_between_special_tokens: without effect, as for the fast tokenizers of transformers.
        """
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        if isinstance(ids, int):
            return self.tokenizer.decode([ids], skip_special_tokens)
        if len(ids) and not isinstance(ids[0], int):
            return [self.decode(row, skip_special_tokens) for row in ids]
        return self.tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(self, sequences: Iterable[Any], skip_special_tokens: bool = False) -> list[str]:
        """Return the text of each sequence of tokens, or of each token."""
        return [self.decode(sequence, skip_special_tokens) for sequence in sequences]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token, or of several: for one not in the vocabulary the unknown token's, or None."""
        return self._ids([tokens])[0] if isinstance(tokens, str) else self._ids(tokens)

    def _ids(self, tokens: Iterable[str]) -> list[int | None]:
        find = self.tokenizer.original.token_to_id
        unknown = self.special_tokens_map.get("unk_token")
        other = None if unknown is None else find(unknown)
        return [other if (token_id := find(token)) is None else token_id for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> Any:
        """Return the name of a token in the vocabulary, or of several; None for an unknown id."""
        if isinstance(ids, int):
            return self.tokenizer.convert_ids_to_tokens([ids])[0]
        special = set(self.all_special_ids) if skip_special_tokens else set()
        return self.tokenizer.convert_ids_to_tokens([int(i) for i in ids if int(i) not in special])

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> str | list[int]:
        """Return the prompt for a conversation: its token ids, or without `tokenize` its text.

        variables: further ones of the template. Others as for `LLM.chat`.

        Raises:
            ValueError, TypeError: there is no template, or it refuses the conversation.
        """
        if chat_template is None and self.chat_template != self.tokenizer.chat_template:
            chat_template = self.chat_template  # the program has set it
        text: str = wiring.render_chat(
            self.tokenizer,
            conversation,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text
