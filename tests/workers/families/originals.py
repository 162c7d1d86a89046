"""Tiny random checkpoints of the families with code in their repositories, in the originals' names and shapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from tests.workers.architectures import VOCAB_SIZE
from tests.workers.families import plain_torch
from tests.workers.families.plain_torch import Fields, Tensors

HIDDEN, HEADS, SIZE, INNER, LAYERS = 64, 4, 16, 96, 2
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Original:
    """A model of a family: its config.json, the shapes of its tensors, and its logits [T, V] of tokens int64 [T].

    stack: its layers run as one `DecoderStack`.
    """

    name: str
    config: Fields
    shapes: Shapes
    logits: Callable[[Tensors, Fields, Tensor], Tensor]
    stack: bool = True

    def tensors(self) -> dict[str, Tensor]:
        """Its random weights; the weights of norms are near 1."""
        generator = torch.Generator().manual_seed(0)
        made = {name: torch.randn(shape, generator=generator) for name, shape in sorted(self.shapes.items())}
        return {
            name: 1 + 0.1 * x if x.ndim == 1 and name.endswith("weight") else 0.15 * x
            for name, x in made.items()
        }

    def write(self, folder: Path) -> Path:
        """Its checkpoint in `folder`."""
        config = {
            "torch_dtype": "float32",
            "auto_map": {"AutoConfig": "model.Config", "AutoModelForCausalLM": "model.Model"},
        } | self.config
        (folder / "config.json").write_text(json.dumps(config))
        save_file(self.tensors(), folder / "model.safetensors")
        return folder


def of_layers(prefix: str, within: Shapes, outside: Shapes) -> Shapes:
    """The shapes of all tensors, given those within a layer."""
    layers = {f"{prefix}.{i}.{name}": shape for i in range(LAYERS) for name, shape in within.items()}
    return outside | layers


SIZES = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "intermediate_size": INNER,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
MLP = {f"mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")} | {
    "mlp.down_proj.weight": (HIDDEN, INNER)
}
NORMS = {f"{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}


def llama_shapes(
    keys: int = HEADS, *, tied: bool = False, bias: bool = False, norm_bias: bool = False
) -> Shapes:
    """Those of a Llama with this number of key heads."""
    rows = {"q": HEADS * SIZE, "k": keys * SIZE, "v": keys * SIZE, "o": HIDDEN}
    within = MLP | NORMS | {f"self_attn.{name}_proj.weight": (n, HIDDEN) for name, n in rows.items()}
    outside: Shapes = {"model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if bias:
        within |= {f"self_attn.{name}_proj.bias": (n,) for name, n in rows.items()}
    if norm_bias:
        within |= {name.replace("weight", "bias"): shape for name, shape in NORMS.items()}
        outside["model.norm.bias"] = (HIDDEN,)
    if not tied:
        outside["lm_head.weight"] = (VOCAB_SIZE, HIDDEN)
    return of_layers("model.layers", within | {"self_attn.rotary_emb.inv_freq": (SIZE // 2,)}, outside)


def baichuan_shapes(vocab_size: int = VOCAB_SIZE) -> Shapes:
    """Those of Baichuan."""
    within = MLP | NORMS | {"self_attn.W_pack.weight": (3 * HIDDEN, HIDDEN)}
    within["self_attn.o_proj.weight"] = (HIDDEN, HIDDEN)
    outside: Shapes = {f"{name}.weight": (vocab_size, HIDDEN) for name in ("model.embed_tokens", "lm_head")}
    return of_layers("model.layers", within, outside | {"model.norm.weight": (HIDDEN,)})


def decilm_shapes(counts: list[int]) -> Shapes:
    """Those of a Llama whose layers have these numbers of key heads."""
    shapes = llama_shapes()
    for layer, count in enumerate(counts):
        for name in ("k", "v"):
            shapes[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = (count * SIZE, HIDDEN)
    return shapes


def exaone_shapes(keys: int) -> Shapes:
    """Those of EXAONE 3."""
    rows = {"q": HEADS * SIZE, "k": keys * SIZE, "v": keys * SIZE, "out": HIDDEN}
    within: Shapes = {f"attn.attention.{name}_proj.weight": (n, HIDDEN) for name, n in rows.items()}
    within |= {f"mlp.{name}.weight": (INNER, HIDDEN) for name in ("c_fc_0", "c_fc_1")}
    within |= {"mlp.c_proj.weight": (HIDDEN, INNER), "ln_1.weight": (HIDDEN,), "ln_2.weight": (HIDDEN,)}
    outside = {"transformer.wte.weight": (VOCAB_SIZE, HIDDEN), "transformer.ln_f.weight": (HIDDEN,)}
    return of_layers("transformer.h", within, outside)


def internlm2_shapes(keys: int) -> Shapes:
    """Those of InternLM 2."""
    within: Shapes = {f"feed_forward.{name}.weight": (INNER, HIDDEN) for name in ("w1", "w3")}
    within |= {"feed_forward.w2.weight": (HIDDEN, INNER), "attention.wo.weight": (HIDDEN, HIDDEN)}
    within |= {"attention.wqkv.weight": ((HEADS + 2 * keys) * SIZE, HIDDEN)}
    within |= {"attention_norm.weight": (HIDDEN,), "ffn_norm.weight": (HIDDEN,)}
    outside: Shapes = {
        "model.tok_embeddings.weight": (VOCAB_SIZE, HIDDEN),
        "output.weight": (VOCAB_SIZE, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    return of_layers("model.layers", within, outside)


def qwen_shapes() -> Shapes:
    """Those of Qwen 1."""
    within: Shapes = {f"mlp.{name}.weight": (INNER, HIDDEN) for name in ("w1", "w2")}
    within |= {"mlp.c_proj.weight": (HIDDEN, INNER), "ln_1.weight": (HIDDEN,), "ln_2.weight": (HIDDEN,)}
    within |= {"attn.c_attn.weight": (3 * HIDDEN, HIDDEN), "attn.c_attn.bias": (3 * HIDDEN,)}
    within["attn.c_proj.weight"] = (HIDDEN, HIDDEN)
    outside: Shapes = {f"{name}.weight": (VOCAB_SIZE, HIDDEN) for name in ("transformer.wte", "lm_head")}
    return of_layers("transformer.h", within, outside | {"transformer.ln_f.weight": (HIDDEN,)})


def chatglm_shapes(keys: int, *, bias: bool) -> Shapes:
    """Those of ChatGLM 2 and later."""
    rows = (HEADS + 2 * keys) * SIZE
    within: Shapes = {"self_attention.query_key_value.weight": (rows, HIDDEN)} | NORMS
    within |= {"self_attention.query_key_value.bias": (rows,)} if bias else {}
    within |= {"mlp.dense_h_to_4h.weight": (2 * INNER, HIDDEN), "mlp.dense_4h_to_h.weight": (HIDDEN, INNER)}
    within["self_attention.dense.weight"] = (HIDDEN, HIDDEN)
    outside: Shapes = {
        "transformer.embedding.word_embeddings.weight": (VOCAB_SIZE, HIDDEN),
        "transformer.output_layer.weight": (VOCAB_SIZE, HIDDEN),
        "transformer.encoder.final_layernorm.weight": (HIDDEN,),
        "transformer.rotary_pos_emb.inv_freq": (SIZE // 4,),
    }
    return of_layers("transformer.encoder.layers", within, outside)


def jais_shapes() -> Shapes:
    """Those of Jais."""
    within: Shapes = {"ln_1.weight": (HIDDEN,), "ln_1.bias": (HIDDEN,)}
    within |= {"ln_2.weight": (HIDDEN,), "ln_2.bias": (HIDDEN,)}
    matrices = {"attn.c_attn": (HIDDEN, 3 * HIDDEN), "attn.c_proj": (HIDDEN, HIDDEN)}
    matrices |= {"mlp.c_fc": (HIDDEN, INNER), "mlp.c_fc2": (HIDDEN, INNER), "mlp.c_proj": (INNER, HIDDEN)}
    for name, (rows, columns) in matrices.items():
        within |= {f"{name}.weight": (rows, columns), f"{name}.bias": (columns,)}
    outside: Shapes = {
        "transformer.wte.weight": (VOCAB_SIZE, HIDDEN),
        "transformer.relative_pe.slopes": (HEADS,),
    }
    outside |= {"transformer.ln_f.weight": (HIDDEN,), "transformer.ln_f.bias": (HIDDEN,)}
    return of_layers("transformer.h", within, outside)


def named(architecture: str, model_type: str, **fields: Any) -> Fields:
    """A configuration with Llama's names of sizes."""
    return SIZES | {"architectures": [architecture], "model_type": model_type} | fields


CHATGLM = {
    "architectures": ["ChatGLMModel"],
    "model_type": "chatglm",
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_layers": LAYERS,
    "ffn_hidden_size": INNER,
    "kv_channels": SIZE,
    "padded_vocab_size": VOCAB_SIZE,
    "seq_length": 128,
    "layernorm_epsilon": 1e-5,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "rmsnorm": True,
    "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False,
    "original_rope": True,
}
EXAONE = {
    "architectures": ["ExaoneForCausalLM"],
    "model_type": "exaone",
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "num_layers": LAYERS,
    "intermediate_size": INNER,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 128,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "silu",
    "rope_theta": 500000.0,
}
QWEN = {
    "architectures": ["QWenLMHeadModel"],
    "model_type": "qwen",
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 2 * INNER,
    "kv_channels": SIZE,
    "vocab_size": VOCAB_SIZE,
    "seq_length": 128,
    "max_position_embeddings": 512,
    "layer_norm_epsilon": 1e-6,
    "rotary_emb_base": 20000,
    "rotary_pct": 1.0,
    "no_bias": True,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
}
SECOND_BAICHUAN = named("BaichuanForCausalLM", "baichuan", vocab_size=125_696)
ALIBI_BAICHUAN = {
    "architectures": ["BaichuanForCausalLM"],
    "model_type": "baichuan",
    "model_max_length": 128,
    "hidden_size": HIDDEN,
}
JAIS = {
    "architectures": ["JAISLMHeadModel"],
    "model_type": "jais",
    "n_embd": HIDDEN,
    "n_head": HEADS,
    "n_layer": LAYERS,
    "n_inner": INNER,
    "n_positions": 128,
    "vocab_size": VOCAB_SIZE,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "swiglu",
    "position_embedding_type": "alibi",
    "mup_embeddings_scale": 3.0,
    "mup_output_alpha": 2.0,
    "mup_width_scale": 0.4,
    "mup_scale_qk_dot_by_d": True,
}
MINICPM = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16, "num_key_value_heads": 2}
INTERNLM2 = {"bias": False, "num_key_value_heads": 2, "attn_implementation": "eager"}
FUSED = partial(plain_torch.llama, fused=True)

ORIGINALS = [
    Original("aquila", named("AquilaModel", "aquila"), llama_shapes(), plain_torch.llama),
    Original("xverse", named("XverseForCausalLM", "xverse"), llama_shapes(), plain_torch.llama),
    Original(
        "internlm",
        named("InternLMForCausalLM", "internlm", bias=True),
        llama_shapes(bias=True),
        plain_torch.llama,
    ),
    Original(
        "orion",
        named("OrionForCausalLM", "orion", num_key_value_heads=2),
        llama_shapes(2, norm_bias=True),
        plain_torch.orion,
    ),
    Original(
        "minicpm",
        named("MiniCPMForCausalLM", "minicpm", **MINICPM),
        llama_shapes(2, tied=True),
        plain_torch.minicpm,
    ),
    Original("baichuan 7B", named("BaiChuanForCausalLM", "baichuan"), baichuan_shapes(), FUSED),
    Original(
        "baichuan 2 7B",
        SECOND_BAICHUAN,
        baichuan_shapes(125_696),
        partial(FUSED, head=partial(F.normalize, dim=1)),
    ),
    Original(
        "baichuan 13B",
        {name: value for name, value in SIZES.items() if name != "max_position_embeddings"} | ALIBI_BAICHUAN,
        baichuan_shapes(),
        partial(FUSED, rotate=lambda x: x, slopes=[2**-2, 2**-4, 2**-6, 2**-8]),
    ),
    Original("jais", JAIS, jais_shapes(), plain_torch.jais),
    Original(
        "decilm",
        named("DeciLMForCausalLM", "deci", num_key_value_heads_per_layer=[1, 2]),
        decilm_shapes([1, 2]),
        plain_torch.llama,
    ),
    Original("exaone", EXAONE, exaone_shapes(2), plain_torch.exaone),
    Original(
        "internlm2",
        named("InternLM2ForCausalLM", "internlm2", **INTERNLM2),
        internlm2_shapes(2),
        plain_torch.internlm2,
    ),
    Original("qwen", QWEN, qwen_shapes(), plain_torch.qwen),
    Original("chatglm", CHATGLM, chatglm_shapes(2, bias=True), plain_torch.chatglm),
    Original(
        "glm-4",
        CHATGLM | {"multi_query_attention": False, "rope_ratio": 500, "add_qkv_bias": False},
        chatglm_shapes(HEADS, bias=False),
        plain_torch.chatglm,
    ),
]
