"""What describes the names of a GGUF file's tensors, and the names that many architectures have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
LLAMA = ATTENTION | NORMS | GATED
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
SHARED = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
EXPERTS = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
CORRECTION = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}


class JoinedTensors(NamedTuple):
    """A weight of a layer that is made of one or two tensors."""

    name: str
    """transformers' name, without a suffix."""
    form: JoinedForm
    other: str = ""
    """llama.cpp's name of the second tensor."""


JoinedForm = Literal["", "stack", "transposed stack", "halves", "transposed halves", "heads", "linear heads"]
"""How one or two tensors make a weight.

Matrices of experts [E, N, K], or in transformers [E, K, N], where rows of two tensors take turns ("stack") or those
of the second come after those of the first ("halves", of single matrices, too). Keys [H, L, D] and values [H, V, L]
of all heads, for a matrix [H (D + V), L]. Queries, keys and values of all heads of linear attention, and their
gates, for a matrix that has all parts of a head of keys together.
"""


class TiledHeads(NamedTuple):
    """Heads of values of linear attention in llama.cpp's order: of all heads of keys the first, then the second.

    In transformers, all heads of values of a head of keys are together.
    """

    after_keys: bool = False
    """Rows of queries and keys come before those of values."""
    single: bool = False
    """A head is one row."""
    columns: bool = False
    """Heads are columns, not rows."""


@dataclass(frozen=True)
class GGUFNames:
    """The names of one type of models."""

    layer: Mapping[str, str]
    """In a layer: llama.cpp's part of a name to transformers'."""
    top: Mapping[str, str]
    """Outside of the layers."""
    layers: str = "model.layers"
    experts: str = ""
    """Where a layer has its experts."""
    expert: Mapping[str, str] | None = None
    """In an expert, as in a layer."""
    rotated: bool = False
    """The rows of queries and keys are in the order in which llama.cpp rotates them: pairs side by side."""
    norms_plus_one: bool = False
    """Norms are stored with 1 added to their weights."""
    transposed: bool = False
    """Matrices within layers are [K, N] in transformers."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """In a layer, as `layer`, where names differ with their suffixes: {"attn_sinks.weight": "self_attn.sinks"}."""
    joined: Mapping[str, JoinedTensors] = field(default_factory=dict)
    """In a layer: what makes a weight together with another tensor, or is a stack in transformers, too."""
    lists: Mapping[str, str] = field(default_factory=dict)
    """Outside of the layers: stacks that are lists of matrices in transformers."""
    tiled: Mapping[str, TiledHeads] = field(default_factory=dict)
    """In a layer: tensors with heads of values of linear attention."""
