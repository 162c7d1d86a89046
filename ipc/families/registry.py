"""The families that are known, by the names in their config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pagewire.ipc.families.baichuan import BAICHUAN
from pagewire.ipc.families.chatglm import CHATGLM
from pagewire.ipc.families.decilm import DECILM
from pagewire.ipc.families.exaone import EXAONE
from pagewire.ipc.families.family import Family, ForeignModel
from pagewire.ipc.families.gemma3n import GEMMA3N
from pagewire.ipc.families.internlm2 import INTERNLM2
from pagewire.ipc.families.jais import JAIS
from pagewire.ipc.families.plain import AQUILA, INTERNLM, KIMI, MINICPM, ORION, XVERSE
from pagewire.ipc.families.qwen import QWEN
from pagewire.ipc.families.refused import REFUSED
from pagewire.ipc.models.registrations import family_paths, import_object

SERVED = (
    *(AQUILA, BAICHUAN, CHATGLM, DECILM, EXAONE, GEMMA3N, INTERNLM, INTERNLM2, JAIS, KIMI, MINICPM, ORION),
    *(QWEN, XVERSE),
)
FAMILIES = (*SERVED, *REFUSED)
OTHER_HEADS = ("RewardModel", "ForSequenceClassification", "ForTokenClassification")
"""How the names of classes end that no family has: their heads are the repository's own."""


def foreign_model(values: Mapping[str, Any], trust_remote_code: bool) -> ForeignModel | None:
    """The model of a config.json as one of a family; None if it is of none, or if only its own code serves it.

    Raises:
        ValueError: the family is not served, or not with these settings, and its own code may not run either.
    """
    family = _family(values, (*_registered(), *FAMILIES))
    try:
        return None if family is None else ForeignModel.of(family, values)
    except ValueError:
        if trust_remote_code and "auto_map" in values and family in FAMILIES:
            return None
        raise


def _family(values: Mapping[str, Any], families: Sequence[Family]) -> Family | None:
    named = values.get("architectures")
    architectures = {name for name in named if isinstance(name, str)} if isinstance(named, list) else set()
    for family in families:
        if family.architectures & architectures:
            return family
    if any(name.endswith(OTHER_HEADS) for name in architectures):
        return None
    kind = values.get("model_type")  # less telling: a DeciLM may call itself a Llama
    return next((family for family in families if isinstance(kind, str) and kind in family.model_types), None)


def _registered() -> Iterator[Family]:
    """The tables that a program or a plugin has registered.

    Raises:
        ValueError: one cannot be imported, or is no `Family`.
    """
    for path in family_paths():
        if not isinstance(family := import_object(path), Family):
            raise ValueError(
                f"{path} is registered as a family, but is a {type(family).__name__}, not a Family"
            )
        yield family
