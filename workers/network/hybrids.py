"""Networks of hybrids: layers whose mixers keep states beside layers that attend, each with a feed-forward half.

A half whose parts the kernels know is data, as in any other network (`structures.py`, `mixers.py`). The other ones
are modules of transformers that compute themselves (`ModuleHalf`), within a step with our recurrences and our
attention. Norms, sums and gated products between them then run compiled.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.workers.module.invariant import Invariant
from pagewire.workers.module.recurrences import MIXERS
from pagewire.workers.module.structure import LLAMA, STACKED_HYBRIDS, DecoderNames
from pagewire.workers.module.weights import Weights
from pagewire.workers.network.mixers import form_of
from pagewire.workers.network.parts import module_bytes, transform_parts
from pagewire.workers.network.structures import (
    LLAMA_LIKE,
    LayerParts,
    OtherStructureError,
    Structure,
    attention_window,
    children,
    chosen,
    has_latents,
    latent_parts,
    require,
    with_feed_forward,
)
from pagewire.workers.step.context import current_step

HEAD_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
OUTPUTS = ("o_proj", "out_proj")
ROTARIES = ("rotary_emb", "pos_emb")


@dataclass(frozen=True)
class HybridNames:
    """How a family names the parts of its layers and its last norm.

    mixers: of which each layer has one. norms: before each half. inner: the names within feed-forward halves.
    """

    mixers: tuple[str, ...] = ("linear_attn", "self_attn")
    feed_forward: str = "mlp"
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    final_norm: str = "norm"
    inner: DecoderNames = LLAMA

    def layers(self, base: Any, numbers: Iterable[int] | None) -> Iterable[LayerParts]:
        """The parts of a base's layers of these numbers; None: of all."""
        for layer in chosen(base.layers, numbers):
            (mixer,) = children(layer) - {self.feed_forward, *self.norms}
            require(mixer in self.mixers and len(children(layer)) == 4)
            norms = getattr(layer, self.norms[0]), getattr(layer, self.norms[1])
            parts = _mixer(getattr(layer, mixer), base.config, norms)
            yield self._with_feed_forward(parts, getattr(layer, self.feed_forward))

    def _with_feed_forward(self, parts: LayerParts, half: Any) -> LayerParts:
        """A layer's parts with its feed-forward half, which runs as it is if its parts are others."""
        try:
            return with_feed_forward(parts, half, self.inner)
        except OtherStructureError:
            return replace(parts, feed_forward=half)

    def structure(self, base: Any) -> Structure:
        """The structure of a base with these names."""
        rotary = children(base) & set(ROTARIES)
        require(children(base) - rotary == {"embed_tokens", "layers", self.final_norm})
        return replace(
            LLAMA_LIKE,
            layers=self.layers,
            final_norm=lambda base: getattr(base, self.final_norm),
            rotary=next(iter(rotary), None),
        )


OF_LFM2 = HybridNames(
    ("conv", "self_attn"),
    "feed_forward",
    ("operator_norm", "ffn_norm"),
    "embedding_norm",
    DecoderNames(up=("w1", "w3"), down="w2"),
)
OF_MAMBA = HybridNames(
    ("mamba", "self_attn"), "feed_forward", ("input_layernorm", "pre_ff_layernorm"), "final_layernorm"
)
OTHERS = {"bamba": OF_MAMBA, "jamba": OF_MAMBA, "lfm2": OF_LFM2, "lfm2_moe": OF_LFM2}
HYBRIDS: dict[str, HybridNames] = {name: OTHERS.get(name, HybridNames()) for name in STACKED_HYBRIDS}
"""By model type."""


def _mixer(module: Any, config: Any, norms: tuple[Any, Any]) -> LayerParts:
    """The parts of a layer with this mixer, and no feed-forward half yet."""
    if has_latents(module):
        return latent_parts(module, norms, interleaved=True)
    form = form_of(module)
    if form is not None:
        return LayerParts(
            qkv=[getattr(module, name) for name in form.inputs],
            out=getattr(module, form.out),
            up=(),
            down=None,
            norms=norms,
            head_dim=0,
            gated=True,
            mixer=module,
        )
    found = children(module)
    output = next((name for name in OUTPUTS if name in found), "")
    head_norms = next((names for names in HEAD_NORMS if found >= set(names)), ())
    is_plain = (
        found == {"q_proj", "k_proj", "v_proj", output, *head_norms}
        and not list(module.named_parameters(recurse=False))
        and hasattr(module, "scaling")
    )
    if not is_plain:
        return LayerParts((), None, (), None, norms, head_dim=0, gated=True, mixer=module)
    queries, attended = module.q_proj.out_features, getattr(module, output).in_features
    require(queries in (attended, 2 * attended))
    return LayerParts(
        qkv=(module.q_proj, module.k_proj, module.v_proj),
        out=getattr(module, output),
        up=(),
        down=None,
        norms=norms,
        head_dim=module.head_dim,
        gated=True,
        window=attention_window(module, config),
        index=module.layer_idx,
        scale=float(module.scaling),
        head_norms=tuple(getattr(module, name) for name in head_norms) or None,
        gated_queries=queries == 2 * attended,
    )


class ModuleHalf:
    """A module of transformers that is a half of a layer; its products are ours.

    rotary: makes the angles that it takes beside states; None: it takes none.
    """

    def __init__(self, module: Any, rotary: Any) -> None:
        self.module, self._rotary = module, rotary
        self._mixer = MIXERS.get(type(module).__name__)
        names = inspect.signature(type(module).forward).parameters
        self._takes_angles = rotary is not None and "position_embeddings" in names
        self._rest = {"attention_mask": None} if "attention_mask" in names else {}
        self.num_bytes = module_bytes([module])

    @classmethod
    def of(cls, module: nn.Module, rotary: Any, weights: Weights, device: torch.device) -> ModuleHalf:
        """With its products packed on a device."""
        transform_parts(module, weights, device)
        return cls(module, rotary)

    def __call__(self, x: Tensor) -> Tensor:
        """Normed states [T, H] to [T, H]."""
        if self._mixer is not None:
            return self._mixer(self.module, x)
        with Invariant():
            states, rest = x[None], self._rest
            if self._takes_angles:
                rest = rest | {"position_embeddings": self._rotary(states, current_step().positions[None])}
            out = self.module(states, **rest)
            return (out[0] if isinstance(out, tuple) else out)[0]  # type: ignore[no-any-return]
