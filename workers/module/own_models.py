"""Models of families that no class of transformers computes, as small changes of classes that it has.

Importing this module makes them known to transformers, by the types in their configurations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel, GPT2Model
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM, LlamaModel
from transformers.pytorch_utils import Conv1D

from pagewire.workers.module.attention_layer import Attention
from pagewire.workers.module.replaced_methods import heads_first


class AlibiLlamaConfig(LlamaConfig):  # type: ignore[misc]
    """The configuration of a Llama with ALiBi in place of a rotary embedding."""

    model_type = "alibi_llama"


class AlibiLlamaAttention(LlamaAttention):  # type: ignore[misc]
    """The attention of `AlibiLlamaModel`."""

    def __init__(self, config: AlibiLlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.attention = Attention(layer_idx, self.scaling, alibi=True)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """See `LlamaAttention.forward`."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            project(hidden_states).view(shape).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(self.attention(query, key, value)), None


class AlibiLlamaModel(LlamaModel):  # type: ignore[misc]
    """A Llama with ALiBi: Baichuan 13B."""

    config_class = AlibiLlamaConfig

    def __init__(self, config: AlibiLlamaConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            layer.self_attn = AlibiLlamaAttention(config, index)


class AlibiLlamaForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """An `AlibiLlamaModel` with its output layer."""

    config_class = AlibiLlamaConfig

    def __init__(self, config: AlibiLlamaConfig) -> None:
        super().__init__(config)
        self.model = AlibiLlamaModel(config)
        self.post_init()


class JaisConfig(GPT2Config):  # type: ignore[misc]
    """The configuration of Jais, with the factors of embeddings, of logits, and of the logits of attention."""

    model_type = "jais"


class JaisAttention(nn.Module):
    """GPT-2's attention with ALiBi, and with a factor of its own."""

    def __init__(self, config: JaisConfig, layer_idx: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads, self.layer_idx = config.num_attention_heads, layer_idx
        self.head_dim = size // config.num_attention_heads
        self.scaling = config.attention_scale
        self.attention = Attention(layer_idx, self.scaling, alibi=True)
        self.c_attn, self.c_proj = Conv1D(3 * size, size), Conv1D(size, size)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """See `GPT2Attention.forward`."""
        parts = self.c_attn(hidden_states).chunk(3, -1)
        query, key, value = (heads_first(part, self.num_heads) for part in parts)
        return self.c_proj(self.attention(query, key, value)), None


class JaisMLP(nn.Module):
    """An MLP whose second matrix is the gate."""

    def __init__(self, inner: int, size: int) -> None:
        super().__init__()
        self.c_fc, self.c_fc2, self.c_proj = Conv1D(inner, size), Conv1D(inner, size), Conv1D(size, inner)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Hidden states [..., H] to hidden states [..., H]."""
        gated = self.c_fc(hidden_states) * F.silu(self.c_fc2(hidden_states))
        return self.c_proj(gated)  # type: ignore[no-any-return]


class NoPositions(nn.Module):
    """Stands in for an embedding of positions, and adds nothing."""

    def forward(self, position_ids: Tensor) -> Tensor:
        """Zero, for positions int64 [...]."""
        return torch.zeros((), device=position_ids.device)


class JaisModel(GPT2Model):  # type: ignore[misc]
    """GPT-2 with ALiBi, gated MLPs, and a factor of its embeddings."""

    config_class = JaisConfig

    def __init__(self, config: JaisConfig) -> None:
        super().__init__(config)
        self.wpe = NoPositions()
        inner = config.n_inner or 4 * config.hidden_size
        for index, block in enumerate(self.h):
            block.attn, block.mlp = JaisAttention(config, index), JaisMLP(inner, config.hidden_size)

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **others: Any
    ) -> Any:
        """See `GPT2Model.forward`."""
        embeddings = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        return super().forward(inputs_embeds=embeddings * self.config.embeddings_scale, **others)


class JaisLMHeadModel(GPT2LMHeadModel):  # type: ignore[misc]
    """A `JaisModel` with its output layer, and a factor of the logits."""

    config_class = JaisConfig

    def __init__(self, config: JaisConfig) -> None:
        super().__init__(config)
        self.transformer = JaisModel(config)
        self.post_init()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See `GPT2LMHeadModel.forward`."""
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * self.config.logits_scale
        return output


for _config, _base, _causal in (
    (AlibiLlamaConfig, AlibiLlamaModel, AlibiLlamaForCausalLM),
    (JaisConfig, JaisModel, JaisLMHeadModel),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _base, exist_ok=True)
    AutoModelForCausalLM.register(_config, _causal, exist_ok=True)
