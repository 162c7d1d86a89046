"""Prompts for a text between two others (fill in the middle), in the form that the model was trained with."""

from __future__ import annotations

from pagewire.frontend.text.tokenizer import Tokenizer

PREFIX, SUFFIX = 0, 1  # the texts before and after the one that is asked for
# Each form is known by its marks, every one of which is a token of its own in the models' vocabularies.
FORMS: tuple[tuple[str | int, ...], ...] = (
    (
        "<|fim_prefix|>",
        PREFIX,
        "<|fim_suffix|>",
        SUFFIX,
        "<|fim_middle|>",
    ),  # Qwen2.5-Coder, CodeGemma, Granite 4
    ("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"),  # StarCoder, Granite Code
    ("<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>"),  # DeepSeek  # noqa: RUF001
    ("▁<PRE>", PREFIX, "▁<SUF>", SUFFIX, "▁<MID>"),  # CodeLlama
    ("<|code_prefix|>", PREFIX, "<|code_suffix|>", SUFFIX, "<|code_middle|>"),  # GLM-4
    ("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX),  # Codestral
)


def infill_prompt(tokenizer: Tokenizer, prefix: str, suffix: str) -> str:
    """Return the prompt whose completion stands between two texts.

    Raises:
        ValueError: the model has no tokens for it.
    """
    form = next((form for form in FORMS if all(is_token(tokenizer, part) for part in form)), None)
    if form is None:
        raise ValueError(
            "suffix is not supported by this model: its vocabulary has no marks to fill in the middle"
        )
    texts = (prefix, suffix)
    return "".join(part if isinstance(part, str) else texts[part] for part in form)


def is_token(tokenizer: Tokenizer, part: str | int) -> bool:
    """Return True for a mark that is one token, and for the place of a text."""
    if isinstance(part, int):
        return True
    token_ids = tokenizer.encode(part, add_special_tokens=False)
    return len(token_ids) == 1 and tokenizer.convert_ids_to_tokens(token_ids) == [part]
