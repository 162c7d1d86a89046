"""What names say: which models' layers run as the stack of a `Network`, and how long they are. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

EXPERTS = "experts"
SHARED = {"shared_expert", "shared_experts", "shared_mlp"}
"""The names, in a half of experts, of those that every token gets."""
SHARED_GATE = "shared_expert_gate"
GIVEN_NORMS = {"post_mlp_layernorm"}
"""The names, in a half of experts, of the norm of what all of them give together."""


@dataclass(frozen=True)
class DecoderNames:
    """How a family of decoders names the parts of its layers, and what these compute beside Llama's.

    qkv, up: of linear layers that are joined to one; a single name is of one that is joined already. Of four in
    qkv, the second one makes gates of what attention gives; softplus_gates: these open by their softplus.
    norms: of the inputs of attention and of the feed-forward half; None: it takes the sum itself, or in parallel
    layers what attention takes. own_norms: of what each half gives. head_norms: a layer may be without.
    gated: the feed-forward half begins with gates, too. parallel: its input is the layer's. interleaved: rotation
    turns neighbours; index_interleaved: so it does in an indexer. single_angles: its tables have an angle once, not
    for both elements that it turns.
    head_norm_form: see `kernels.data.layer.HeadNormForm`.
    shared: beside a half of experts, the one that every token gets, if it is not within that.
    unturned: an attribute of attention that is false where a layer has no rotation, if others have windows.
    residual_scale: an attribute of a layer with a factor. embedding_scale: one of the base, or "hidden_size" for
    the root of that, "mup_enabled" where that setting is on; of a base whose embedding does not scale by itself.
    by_head: the one layer in `qkv` has the query, the key and the value of one head after another.
    out_norm, down_norm: of what `out` and `down` take. curve: an activation with parameters.
    words: of the base, the tokens' table. embedding_norm: of the base, of embeddings.
    turned_back: rotation is by the negative angles.
    scales_queries: they are scaled by their positions, see `query_scales`; scales_unturned: those of layers without
    rotation are, as in a family of `UNTURNED_SCALES`.
    value_norm: of heads of values. layer_inputs: of the base, the table, the product and the norm of what layers
    get of tokens beside states; input_gate: of a layer, the two products and the norm of it. There may be none.
    output_scale: a buffer of a layer, by which its sum is multiplied.
    value_dim, value_scale: attributes of attention: numbers of a head of values, and what these are multiplied by.
    rotaries: of the base, a list of what makes angles, one for each base of frequencies in `layer_rope_theta` of
    the configuration, which has 0 for a layer without rotation.
    gate_bias: a parameter of attention, added to all gates of a head. depth_scaled: the nth sum is divided by the
    root of n, of which norms see no more than their epsilon.
    experts_beside: of a layer whose experts stand beside its dense half: the router, the experts, the norms of what
    these take and give, and that of what the dense half gives. There may be none.
    """

    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    softplus_gates: bool = False
    out: str = "o_proj"
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    head_norm_form: str = "each"
    mlp: str = "mlp"
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    shared: str = ""
    gated: bool = True
    norms: tuple[str | None, str | None] = ("input_layernorm", "post_attention_layernorm")
    own_norms: tuple[str, str] | None = None
    final_norm: str = "norm"
    parallel: bool = False
    interleaved: bool = False
    single_angles: bool = False
    index_interleaved: bool = False
    unturned: str = ""
    residual_scale: str = ""
    embedding_scale: str = ""
    by_head: bool = False
    out_norm: str = ""
    down_norm: str = ""
    curve: str = ""
    words: str = "embed_tokens"
    embedding_norm: str = ""
    turned_back: bool = False
    scales_queries: bool = False
    scales_unturned: str = ""
    value_norm: str = ""
    layer_inputs: tuple[str, ...] = ()
    input_gate: tuple[str, ...] = ()
    output_scale: str = ""
    value_dim: str = ""
    value_scale: str = ""
    rotaries: str = ""
    gate_bias: str = ""
    depth_scaled: bool = False
    experts_beside: tuple[str, ...] = ()

    @property
    def all_norms(self) -> set[str]:
        """The names of a layer's norms."""
        return {name for name in (*self.norms, *(self.own_norms or ())) if name is not None}


LATENT_KEYS = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
LATENT_QUERIES = (("q_proj",), ("q_a_proj", "q_a_layernorm", "q_b_proj"))
"""The parts of attention to latents: those of keys and values, and of queries, which may have some of their own."""
LLAMA = DecoderNames()
GEMMA_2 = DecoderNames(
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    own_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    embedding_scale="hidden_size",
)
GEMMA_4 = replace(
    GEMMA_2,
    embedding_scale="",
    value_norm="v_norm",
    layer_inputs=("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"),
    input_gate=("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"),
    output_scale="layer_scalar",
    experts_beside=(
        "router",
        "experts",
        "pre_feedforward_layernorm_2",
        "post_feedforward_layernorm_2",
        "post_feedforward_layernorm_1",
    ),
)
OLMO_2 = DecoderNames(
    norms=(None, None),
    own_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    head_norm_form="together",
)
COHERE = DecoderNames(norms=("input_layernorm", None), parallel=True, interleaved=True)
JOINED = DecoderNames(qkv=("qkv_proj",), up=("gate_up_proj",))
GLM = DecoderNames(up=("gate_up_proj",), interleaved=True)
GRANITE = DecoderNames(residual_scale="residual_multiplier", embedding_scale="embedding_multiplier")
GRANITE_MOE = replace(GRANITE, mlp="block_sparse_moe")
GRANITE_MOE_SHARED = replace(GRANITE_MOE, shared="shared_mlp", up=("input_linear",), down="output_linear")
UNGATED = DecoderNames(up=("up_proj",), gated=False)
DECODERS: dict[str, DecoderNames] = {
    "afmoe": DecoderNames(
        qkv=("q_proj", "gate_proj", "k_proj", "v_proj"),
        norms=("input_layernorm", "pre_mlp_layernorm"),
        own_norms=("post_attention_layernorm", "post_mlp_layernorm"),
        unturned="is_local_attention",
        embedding_scale="mup_enabled",
    ),
    "apertus": replace(UNGATED, norms=("attention_layernorm", "feedforward_layernorm"), curve="act_fn"),
    "arcee": UNGATED,
    "beam": DecoderNames(
        qkv=("q_proj", "gate_proj", "k_proj", "v_proj"),
        gate_bias="gate_bias",
        norms=("input_layernorm", "pre_feedforward_layernorm"),
        own_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        depth_scaled=True,
        scales_unturned="beam",
    ),
    "bitnet": DecoderNames(out_norm="attn_sub_norm", down_norm="ffn_sub_norm"),
    "cohere": COHERE,
    **dict.fromkeys(("cohere2", "cohere2_moe"), replace(COHERE, unturned="sliding_window")),
    "cohere_compass_text": replace(COHERE, interleaved=False),
    "cosmos3_edge_text": DecoderNames(up=("fc1",), down="fc2", gated=False),
    "deepseek_v2": DecoderNames(interleaved=True),
    "deepseek_v32": DecoderNames(interleaved=True),
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe"), DecoderNames(interleaved=True)),
    "exaone4": replace(OLMO_2, head_norm_form="each", unturned="is_sliding"),
    "gemma": DecoderNames(embedding_scale="hidden_size"),
    "gemma2": GEMMA_2,
    "gemma3_text": GEMMA_2,
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), GEMMA_4),
    "glm": GLM,
    "glm_moe_dsa": DecoderNames(interleaved=True, index_interleaved=True),
    "gpt_oss": DecoderNames(single_angles=True),
    **dict.fromkeys(
        ("glm4", "glm4v_text", "glm_ocr_text"),
        replace(GLM, own_norms=("post_self_attn_layernorm", "post_mlp_layernorm")),
    ),
    "granite": GRANITE,
    "granite_swa": replace(GRANITE, rotaries="rotary_embs"),
    "granitemoe": GRANITE_MOE,
    "granitemoe_swa": replace(GRANITE_MOE_SHARED, rotaries="rotary_embs"),
    "granitemoeshared": GRANITE_MOE_SHARED,
    "helium": DecoderNames(interleaved=True),
    **dict.fromkeys(
        ("hunyuan_v1_dense", "hunyuan_v1_moe"),
        DecoderNames(head_norms=("query_layernorm", "key_layernorm"), head_norm_form="rotated"),
    ),
    "hyperclovax": replace(GRANITE, own_norms=("post_norm1", "post_norm2")),
    "jais2": UNGATED,
    "kolibri1": DecoderNames(
        own_norms=("post_self_attn_layernorm", "post_mlp_layernorm"), unturned="is_sliding"
    ),
    "laguna": DecoderNames(qkv=("q_proj", "g_proj", "k_proj", "v_proj"), softplus_gates=True),
    "llama4_text": DecoderNames(
        head_norms=("qk_norm", "qk_norm"),
        head_norm_form="rotated",
        mlp="feed_forward",
        interleaved=True,
        unturned="use_rope",
        scales_unturned="llama4",
    ),
    "mimo_v2_flash": DecoderNames(value_dim="v_head_dim", value_scale="v_scale"),
    "minicpm3": DecoderNames(residual_scale="residual_scale"),
    "modernbert-decoder": DecoderNames(
        attention="attn",
        out="Wo",
        up=("Wi",),
        down="Wo",
        norms=("attn_norm", "mlp_norm"),
        final_norm="final_norm",
        words="embeddings.tok_embeddings",
        embedding_norm="embeddings.norm",
    ),
    **dict.fromkeys(("minimax_m2", "olmoe"), DecoderNames(head_norm_form="together")),
    "minimax_m3_vl_text": DecoderNames(up=("gate_up_proj",)),
    "ministral3": DecoderNames(scales_queries=True),
    "nanochat": DecoderNames(
        head_norm_form="rotated",
        up=("fc1",),
        down="fc2",
        gated=False,
        embedding_norm="norm",
        turned_back=True,
    ),
    "nemotron": UNGATED,
    **dict.fromkeys(("flex_olmo", "olmo2", "olmo3"), OLMO_2),
    "persimmon": DecoderNames(
        qkv=("query_key_value",),
        out="dense",
        head_norms=("q_layernorm", "k_layernorm"),
        up=("dense_h_to_4h",),
        down="dense_4h_to_h",
        gated=False,
        final_norm="final_layernorm",
        by_head=True,
    ),
    "phi": DecoderNames(
        out="dense",
        up=("fc1",),
        down="fc2",
        gated=False,
        norms=("input_layernorm", None),
        final_norm="final_layernorm",
        parallel=True,
    ),
    **dict.fromkeys(("phi3", "phi4_multimodal"), JOINED),
    "smollm3": DecoderNames(unturned="use_rope"),
    "starcoder2": DecoderNames(up=("c_fc",), down="c_proj", gated=False),
    "step3p5": DecoderNames(qkv=("q_proj", "g_proj", "k_proj", "v_proj")),
    "vaultgemma": replace(
        LLAMA, norms=("input_layernorm", "pre_feedforward_layernorm"), embedding_scale="hidden_size"
    ),
}
"""By model type, of families whose layers are not Llama's."""
OTHER_ARITHMETIC = {"chameleon"}
"""Model types with the structure of a stack that compute something else. The proof would refuse their stacks, too,
but only after packing all of them."""
STACKED_HYBRIDS = {
    *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear"),
    *("lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "nemotron_h", "olmo_hybrid"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
}
"""Model types with states whose layers add what their halves make of normed states, and do nothing else."""
RENAMED = {"cosmos3_edge_text", "kolibri1"}
"""Model types of stacks whose files have other names than their modules."""
GPT_LIKE = {
    *("biogpt", "bloom", "codegen", "ctrl", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj"),
    *("alibi_llama", "dbrx", "jais", "mpt", "opt"),
}
"""Model types whose parts have names of their own (`workers/families/gpt_structures.py`)."""
BERT_LIKE = {"bert", "roberta", "xlm-roberta", "camembert", "data2vec-text", "electra", "ernie"}
"""Model types of encoders that may be decoders, too."""
USUAL = {"do_layer_norm_before": True, "apply_residual_connection_post_layernorm": False}
"""Settings of these with which their layers run as a stack; what says nothing has them, too."""
NUM_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
"""The names that families give the number of a layer's experts."""
IN_MLP = {"block_sparse_moe", "moe", "share_expert"}
"""The names that checkpoints give what transformers has within a feed-forward half, where the half has another."""
CHUNKED = "chunked_attention"
WINDOWS = {
    "sliding_attention": "sliding_window",
    "hybrid_sliding": "sliding_window",
    "local": "window_size",
    CHUNKED: "attention_chunk_size",
}
"""Types of layers whose queries see the keys of a window or a chunk, and the setting of its size."""
DEFAULT_POSITIONS = 2048  # of a model that gives no limit
ACTIVATIONS = {
    *("silu", "swish", "gelu_pytorch_tanh", "gelu", "gelu_new", "gelu_fast", "relu", "relu2", "xielu"),
}
ACTIVATION_NAMES = ("hidden_act", "activation_function", "activation", "hidden_activation")
"""The names that families give the setting."""
DEFAULT_ACTIVATION = "silu"  # of a configuration that names none


def has_stack_structure(model_type: str, names: Iterable[str], config: Mapping[str, Any]) -> bool:
    """True if tensors of these names make the layers of a stack. Whether it computes the same, the proof says."""
    text = {**config, **(config.get("text_config") or {})}
    if text.get("model_type") in STACKED_HYBRIDS | RENAMED:
        return True
    kind = text.get("model_type") or model_type
    activations = (text.get(name) for name in ACTIVATION_NAMES)
    activation = next((name for name in activations if name is not None), DEFAULT_ACTIVATION)
    if model_type in OTHER_ARITHMETIC or activation not in ACTIVATIONS:
        return False
    if kind in BERT_LIKE:
        return bool(text.get("is_decoder"))
    if kind in GPT_LIKE:
        is_usual = all(text.get(name, usual) == usual for name, usual in USUAL.items())
        return is_usual and text.get("word_embed_proj_dim") in (None, text.get("hidden_size"))
    names = [name for name in names if not name.endswith(".inv_freq")]  # in old checkpoints; not read
    own = DECODERS.get(kind, LLAMA)
    inner = [name.partition("model.layers.")[2].split(".") for name in names]
    # Behind the last one there may be layers that only predict tokens ahead.
    last = text.get("num_hidden_layers") or len(inner)
    found = {
        ".".join([own.mlp if path[1] in IN_MLP else path[1], *path[2:3]])
        .removesuffix(".weight")
        .removesuffix(".bias")
        for path in inner
        if len(path) > 1 and not (path[0].isdecimal() and int(path[0]) >= last)
    } - {
        *_within(own.attention, ("sinks", "attention_sink_bias", "indexer", own.gate_bias)),
        *own.input_gate,
        own.output_scale,
    }
    dense = _within(own.mlp, (*own.up, own.down, own.down_norm))
    found -= _within(own.mlp, (own.curve,))
    found = {name for name in found if name.partition(".")[0] not in own.experts_beside}
    # A half of experts, if its router is known, is one as well.
    if any(text.get(name) for name in NUM_EXPERTS):
        found = {name for name in found if not name.startswith(f"{own.mlp}.")} | dense
        found -= GIVEN_NORMS - own.all_norms  # in the files beside the half
    rest = dense
    if own.shared and any(name.startswith(f"{own.shared}.") for name in found):
        rest |= _within(own.shared, (*own.up, own.down))
    parts = _within(own.attention, (*own.qkv, own.out, own.out_norm))
    heads = parts | _within(own.attention, own.head_norms)
    latents = [_within(own.attention, (*LATENT_KEYS, *queries)) for queries in LATENT_QUERIES]
    norms = own.all_norms, own.all_norms - set(own.own_norms or ()), set[str]()  # some norms have no weights
    return any(found == some | rest | own_norms for some in (parts, heads, *latents) for own_norms in norms)


def _within(module: str, names: Iterable[str]) -> set[str]:
    return {f"{module}.{name}" for name in names if name}
