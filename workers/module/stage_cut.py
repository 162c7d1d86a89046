"""What a stage of a pipeline has of a module's weights, and which models cannot be cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from pagewire.workers.errors import LoadError
from pagewire.workers.module.text_base import base_path
from pagewire.workers.ranks.stages import Stage

SHARED_SETTINGS = {
    "num_kv_shared_layers": "keys and values of earlier layers",
    "hidden_size_per_layer_input": "embeddings of their own",
    "cross_attention_layers": "pictures",
}
"""Settings of models whose layers need more than hidden states."""


def check_cuts(config: Any) -> None:
    """Refuse a model whose layers need more than the hidden states of the layer before them.

    Raises:
        LoadError: they read keys and values of earlier layers, inputs of their own (Gemma 3n, Gemma 4 E2B), or what
            indexers of earlier layers have chosen (GLM-5).
    """
    text = config.get_text_config()
    needs = [need for name, need in SHARED_SETTINGS.items() if getattr(text, name, None)]
    if "shared" in (getattr(text, "indexer_types", None) or ()):
        needs.append("what indexers of earlier layers have chosen")
    if needs:
        raise LoadError(
            f"{text.model_type} cannot be cut into stages: its layers read {needs[0]}, which a later stage would "
            "lack; use pipeline_parallel_size=1, and tensor_parallel_size for several workers"
        )


def cut_down(causal: Any, stage: Stage) -> None:
    """Take all out of a causal module that this stage does not have, also behind its base; it no longer runs.

    Raises:
        LoadError: it is not known where the layers are.
    """
    base = causal.get_submodule(base_path(causal))
    embedding = base.get_input_embeddings()
    parent, name = layer_list(base)
    kept = [
        layer if number in stage.layers else nn.Identity()
        for number, layer in enumerate(getattr(parent, name))
    ]
    setattr(parent, name, nn.ModuleList(kept))
    if not stage.is_first:
        remove_embeddings(base, embedding)
    if not stage.is_last:
        remove_rest(base, parent)
        for name, child in list(causal.named_children()):
            if child is not base:
                setattr(causal, name, nn.Identity())


def layer_list(base: Any) -> tuple[nn.Module, str]:
    """The module that has the list of a base model's layers, and the list's name there.

    It is the one that transformers' plan for pipelines names; without a plan, the only one of as many modules as
    the model has layers.

    Raises:
        LoadError: there is none, or several.
    """
    count = base.config.get_text_config().num_hidden_layers
    plan = pipeline_plan(base)
    found = [
        (parent, name)
        for parent, name in _outermost_lists(base)
        if len(getattr(parent, name)) == count and (not plan or (parent is base and name in plan))
    ]
    if len(found) != 1:
        raise LoadError(
            f"{type(base).__name__} cannot be cut into stages: it has {len(found)} lists of {count} layers; use "
            "pipeline_parallel_size=1"
        )
    return found[0]


def _outermost_lists(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield module, name
        else:
            yield from _outermost_lists(child)


def pipeline_plan(base: Any) -> list[str]:
    """The names of a base model's parts in the order in which they run, by transformers; empty without a plan."""
    return list(getattr(base.config.get_text_config(), "base_model_pp_plan", None) or ())


def remove_embeddings(module: nn.Module, embedding: nn.Module) -> None:
    """Remove embeddings outside of lists of layers."""
    for name, child in list(module.named_children()):
        if child is embedding or type(child) is nn.Embedding:
            setattr(module, name, nn.Identity())
        elif not isinstance(child, nn.ModuleList):
            remove_embeddings(child, embedding)


def remove_rest(base: Any, parent: nn.Module) -> None:
    """Remove what a plan says to run after the layers, whose weights the last stage has."""
    plan = pipeline_plan(base)
    if parent is not base or not plan:
        return  # norms at most, whose weights are a few numbers
    names = dict(base.named_children())
    last = max(i for i, name in enumerate(plan) if isinstance(names.get(name), nn.ModuleList))
    for name in plan[last + 1 :]:
        setattr(base, name, nn.Identity())
