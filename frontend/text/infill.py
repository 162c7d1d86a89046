"""Prompts for a text between two others (fill in the middle), in the form that the model was trained with."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.frontend.text.tokenizer import Tokenizer
from pagewire.ipc.errors import FieldValueError

PREFIX, SUFFIX = 0, 1  # the places of the texts before and after the one that is asked for


@dataclass(frozen=True)
class InfillForm:
    """The form of some models' prompts.

    parts: marks, each of which is a token of its own, and the places of the texts. ends: tokens that end the text.
    """

    parts: tuple[str | int, ...]
    ends: tuple[str, ...] = ()

    @property
    def marks(self) -> list[str]:
        """The marks, in order."""
        return [part for part in self.parts if isinstance(part, str)]

    def prompt(self, prefix: str, suffix: str) -> str:
        """Return the prompt whose completion stands between two texts."""
        texts = (prefix, suffix)
        return "".join(part if isinstance(part, str) else texts[part] for part in self.parts)

    def end_token_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Return the tokens that end the text, beside the model's own: the marks, too, stand in no text."""
        ids = (token_id_of(tokenizer, name) for name in (*self.marks, *self.ends))
        return [token_id for token_id in ids if token_id is not None]


FORMS = (
    InfillForm(  # Qwen2.5-Coder, CodeGemma, Granite 4
        ("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"),
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    InfillForm(  # StarCoder, Granite Code
        ("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"), ("<fim_pad>", "<file_sep>")
    ),
    InfillForm(  # DeepSeek
        ("<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>")  # noqa: RUF001
    ),
    InfillForm(("▁<PRE>", PREFIX, "▁<SUF>", SUFFIX, "▁<MID>"), ("▁<EOT>",)),  # CodeLlama
    InfillForm(("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX)),  # Codestral
)
"""Known by their marks, all of which the vocabulary has."""


def infill_form(tokenizer: Tokenizer) -> InfillForm:
    """Return the form of a model's prompts.

    Raises:
        ValueError: the model has no marks for it.
    """
    for form in FORMS:
        if all(token_id_of(tokenizer, mark) is not None for mark in form.marks):
            return form
    raise FieldValueError(
        "suffix", "is not supported by this model: its vocabulary has no marks to fill in the middle"
    )


def token_id_of(tokenizer: Tokenizer, name: str) -> int | None:
    """Return the id of the token with a name; None if it is none, but several."""
    token_ids = tokenizer.encode(name, add_special_tokens=False)
    return token_ids[0] if tokenizer.convert_ids_to_tokens(token_ids) == [name] else None
