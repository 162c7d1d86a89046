"""Where versions of transformers differ, from the lowest that is served (pyproject.toml) to the tested one.

A model that the installed version lacks may run code of its repository. An entry can go as soon as the lowest
version needs it no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

from torch import Tensor, nn

from pagewire.ipc.models import architectures
from pagewire.ipc.models.registrations import model_path
from pagewire.workers.errors import LoadError

SINCE = {
    **dict.fromkeys(("gte", "hyperclovax_vision_v2", "minicpmv4_7"), (5, 18)),
    **dict.fromkeys(("bailing_hybrid", "beam", "kolibri1", "moss_transcribe_diarize"), (5, 20)),
    **dict.fromkeys(("flint", "minicpm_ocr"), (5, 21)),
    "mistral_large4": (5, 22),
    **dict.fromkeys(("dots3_note_text", "granite_docling", "internlm3"), (5, 23)),
    **dict.fromkeys(("iquestcoder", "lfm3", "lfm3_vl"), (5, 23)),
    "recurrent_gemma": (5, 23),  # earlier versions have it, but its layers have other names
}
"""Model types that earlier versions do not have, and the first version with which they are served."""
NUM_GROUPS = {"bamba": "mamba_n_groups", "granitemoehybrid": "mamba_n_groups", "mamba2": "n_groups"}
GROUPED_NORM = (5, 23)
"""The first version in which these families norm each group of heads alone, as their authors' code does."""
INDEXED_KINDS = {"indexed_attention", "deepseek_sparse_attention"}
"""The names of layers whose indexer chooses keys: that since 5.18, and that before."""


@cache
def transformers_version() -> tuple[int, int]:
    """Major and minor number of the installed version."""
    major, minor = version("transformers").split(".")[:2]
    return int(major), int(minor)


def needs(wanted: tuple[int, int]) -> str:
    """What to do about a model that the installed version does not run."""
    return f"install transformers>={wanted[0]}.{wanted[1]} (this is {version('transformers')})"


def check_model_type(values: Mapping[str, Any]) -> None:
    """Check that the model type in a configuration's values is served with the installed version.

    Raises:
        LoadError: it is not, but it is with a later one.
    """
    if needs_later_version(values):
        kind = values["model_type"]
        raise LoadError(f"{kind} is not supported with this version of transformers: {needs(SINCE[kind])}")


def needs_later_version(values: Mapping[str, Any]) -> bool:
    """True if the model type in a configuration's values is served with a later version than the installed one."""
    kind = values.get("model_type")
    since = SINCE.get(kind) if isinstance(kind, str) else None
    return since is not None and transformers_version() < since


def wrong_arithmetic(text: Any) -> str | None:
    """Why the installed version computes a model wrongly; None if it does not. text: the configuration for text."""
    setting = NUM_GROUPS.get(text.model_type)
    groups = 1 if setting is None else getattr(text, setting)
    if groups == 1 or transformers_version() >= GROUPED_NORM:
        return None
    return f"its {groups} groups of heads share a norm in this version of transformers: {needs(GROUPED_NORM)}"


def norm_group(norm: Any, width: int) -> int:
    """How many of `width` elements a gated norm of Mamba 2 takes together; before 5.23 some do not say: all."""
    size: int = getattr(norm, "group_size", width)
    return size


def has_post_expert_norm(experts: Any) -> bool:
    """True if experts norm their results before they are added up; they have the attribute since 5.20."""
    return getattr(experts, "has_post_expert_norm", False)


def name_attention(causal: Any, name: str) -> None:
    """Have all of a model's parts call the attention of this name that let it be replaced.

    Before 5.20 `set_attn_implementation` leaves out parts with a copy of the model's configuration, as T5 has.
    """
    from transformers import PreTrainedModel

    causal.set_attn_implementation(name)
    for part in causal.modules():
        has_copy = isinstance(part, PreTrainedModel) and type(part.config) is type(causal.config)
        if has_copy and part._can_set_attn_implementation():
            part.config._attn_implementation = name


def rotary_positions(rotary: nn.Module, positions: Tensor) -> Tensor:
    """Positions [1, T] as a rotary embedding takes them: before 5.19 some need one for each axis of a picture."""
    sections = getattr(rotary, "mrope_section", None)
    if sections is None or transformers_version() >= (5, 19):
        return positions
    return positions.expand(len(sections), 1, -1)


def runs_repository_code(values: Mapping[str, Any], trust_remote_code: bool) -> bool:
    """True if a model runs the code of its repository: this is trusted, and nothing else serves the model.

    values: the content of its config.json, as `read_configs` returns it: a family that is served has no code in it.
    """
    return (
        trust_remote_code and "auto_map" in values and model_path(values) is None and not _is_native(values)
    )


def _is_native(values: Mapping[str, Any]) -> bool:
    """True if this version of transformers has the type of a model, and the class that its config.json names.

    A class of another name is the repository's own, whatever type of model it says that it is.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if values.get("model_type") not in CONFIG_MAPPING or needs_later_version(values):
        return False
    name = (values.get("architectures") or [None])[0]
    return name is None or name in architectures.REWARD or name in dir(transformers)
