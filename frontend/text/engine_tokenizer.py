"""The tokenizer that programs get from an engine: the frontend's, with some methods of those of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagewire.frontend.text.tokenizer import Tokenizer


def for_programs(tokenizer: Tokenizer | None) -> EngineTokenizer | None:
    """Return a tokenizer as programs get it; None stays None."""
    return None if tokenizer is None else EngineTokenizer(tokenizer)


class EngineTokenizer(Tokenizer):
    """An engine's tokenizer. `transformers.AutoTokenizer` on `info.tokenizer` of the engine has all of theirs.

    Its attributes are those of the tokenizer that it is made of, and `encode`, `decode` do what that does.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.__dict__.update(vars(tokenizer))
        self._tokenizer = tokenizer

    def __call__(
        self, text: str | Sequence[str], add_special_tokens: bool = True
    ) -> dict[str, list[int] | list[list[int]]]:
        """Return the token ids of a text or of several, as `input_ids`, beside an `attention_mask` of ones."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        batch = self.encode_batch(text, add_special_tokens)
        return {"input_ids": batch, "attention_mask": [[1] * len(ids) for ids in batch]}

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
        return self._tokenizer.encode(given, add_special_tokens)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        return self._tokenizer.encode_batch(texts, add_special_tokens)

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens, spaces_between_special_tokens)

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str | None]:
        return self._tokenizer.convert_ids_to_tokens(token_ids)

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
        from pagewire.frontend.text.chat_template import render_chat  # jinja2 is slow to import

        text = render_chat(
            self,
            conversation,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text
