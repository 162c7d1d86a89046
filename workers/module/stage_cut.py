"""Cuts a base model of transformers down to the layers of a stage, with its own forward.

The forward runs as it is, over a list of layers of the same length. Layers of other stages do nothing. The first
layer of this stage gets the hidden states of the stage before in place of what the forward has made so far, and the
last one ends the forward, since whatever follows concerns the last stage only. What the forward makes beside hidden
states (angles, masks) it makes in every stage. A model that needs more has other logits, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.workers.errors import LoadError
from pagewire.workers.module.text_base import base_path
from pagewire.workers.ranks.stages import Stage

SHARED_SETTINGS = {
    "num_kv_shared_layers": "keys and values of earlier layers",
    "hidden_size_per_layer_input": "embeddings of their own",
    "cross_attention_layers": "pictures",
    "n_mamba_heads": "the embeddings of tokens",  # of Zamba
    "num_mem_blocks": "the embeddings of tokens",  # of Zamba2
    "router_hidden_size": "what routers of earlier layers have computed",  # of ZAYA
}
"""Settings of models whose layers need more than hidden states."""


class CutBase:
    """A base model that has lost the layers of other stages.

    embedding: that of tokens, which the first stage has.

    Raises:
        LoadError: it is not known where the layers are.
    """

    def __init__(self, base: Any, embedding: nn.Module, stage: Stage) -> None:
        self._stage = stage
        self._received: Tensor | None = None
        parent, name = layer_list(base)
        layers: nn.ModuleList = getattr(parent, name)
        if not stage.is_first:
            remove_embeddings(base, embedding)
            layers[stage.layers.start].register_forward_pre_hook(self._enter, with_kwargs=True)
        if not stage.is_last:
            remove_rest(base, parent)
            layers[stage.layers[-1]].register_forward_hook(self._leave)
        kept = [layer if i in stage.layers else AbsentLayer(layer) for i, layer in enumerate(layers)]
        setattr(parent, name, nn.ModuleList(kept))

    def run(self, forward: Callable[[], Any], received: Tensor | None) -> Tensor:
        """Hidden states [T, H] behind this stage's layers.

        forward: of the base. received: [T, H] of the stage before; None in the first one.
        """
        self._received = received
        try:
            return forward()[0][0]  # type: ignore[no-any-return]
        except _LeftError as left:
            return left.states

    def _enter(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._received is not None
        states = self._received[None]
        if args:
            return (states, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": states}

    def _leave(self, _: Any, __: Any, output: Any) -> None:
        states = output if isinstance(output, Tensor) else output[0]
        raise _LeftError(states[0])


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
    """Take all out of a causal module that this stage does not have, also behind its base.

    Raises:
        LoadError: it is not known where the layers are.
    """
    base = causal.get_submodule(base_path(causal))
    CutBase(base, base.get_input_embeddings(), stage)
    if not stage.is_last:
        for name, child in list(causal.named_children()):
            if child is not base:
                setattr(causal, name, nn.Identity())


class _LeftError(Exception):
    """Ends a forward behind the last layer of a stage. states: [T, H] there."""

    def __init__(self, states: Tensor) -> None:
        super().__init__("the forward ends here")
        self.states = states


class AbsentLayer(nn.Module):
    """Stands in for a layer that another stage has, with its attributes, which a forward may read."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, None]:
        """Its input, in a tuple as some layers return: no layer reads what others return beside it."""
        return (args[0] if args else kwargs["hidden_states"]), None


class AbsentEmbedding(nn.Module):
    """Stands in for an embedding that the first stage has."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.embedding_dim = module.embedding_dim
        self.weight = torch.empty(0, dtype=module.weight.dtype)

    def forward(self, ids: Tensor, *_: Any, **__: Any) -> Tensor:
        """Zeros [..., embedding_dim] for ids [...], which no layer reads."""
        return torch.zeros(*ids.shape, self.embedding_dim, dtype=self.weight.dtype, device=ids.device)


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
    """Replace embeddings outside of lists of layers by such without weights."""
    for name, child in list(module.named_children()):
        if child is embedding or type(child) is nn.Embedding:
            setattr(module, name, AbsentEmbedding(child))
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
