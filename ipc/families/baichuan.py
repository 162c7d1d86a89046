"""Baichuan 1 and 2: a Llama whose queries, keys and values are one tensor; the models of 13B have ALiBi."""

from __future__ import annotations

from typing import Any

from pagewire.ipc.families.family import (
    QKV,
    Config,
    Family,
    Split,
    llama,
    module_settings,
    one_below_the_other,
)

SECOND_VOCABULARY = 125_696  # of Baichuan 2, whose output layer has rows of length 1


ROTARY_SIZE, ALIBI_SIZE = 4096, 5120
"""Hidden sizes of the models of 7B, which have a rotary embedding, and of those of 13B, which have ALiBi."""
POSITIONS = "max_position_embeddings"


def _settings(values: Config) -> dict[str, Any]:
    size = values["hidden_size"]
    # Of other sizes, the names of settings tell whose code it is: that of 13B has "model_max_length" alone.
    is_rotary = size == ROTARY_SIZE or (size != ALIBI_SIZE and POSITIONS in values)
    renamed = {} if POSITIONS in values else {"model_max_length": POSITIONS}
    if is_rotary:
        return llama(values, renamed)
    return module_settings(values, "alibi_llama", "BaichuanForCausalLM", renamed)


BAICHUAN = Family(
    "Baichuan",
    frozenset({"BaiChuanForCausalLM", "BaichuanForCausalLM"}),
    frozenset({"baichuan"}),
    _settings,
    layer={"self_attn.W_pack": Split(QKV, one_below_the_other)},
    has_unit_head=lambda values: values.get("vocab_size") == SECOND_VOCABULARY,
)
