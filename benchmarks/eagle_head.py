"""A trainable EAGLE-3 head, and its checkpoint as engines read it.

The arithmetic is that of `workers/speculation/eagle3.py`, over whole lines of text at once. A head drafts several
tokens in a row, from its own outputs in place of states of the model, so it is trained on these as well
("training-time test" of Li et al., "EAGLE-3", 2025): at depth j, place t has gone on j times from the states up to
place t. Its query sees the keys of depth 0 up to place t, and its own keys of the depths 1 to j.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

MAX_LENGTH = 1024
"""Tokens of a line that it is trained on, at most."""

KeysValues: TypeAlias = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """The projections of the attention half; inputs are twice as wide as states."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * size, width, bias=False)
        self.k_proj = nn.Linear(2 * size, width, bias=False)
        self.v_proj = nn.Linear(2 * size, width, bias=False)
        self.o_proj = nn.Linear(width, size, bias=False)


class FeedForward(nn.Module):
    """The feed-forward half."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, width, bias=False)
        self.up_proj = nn.Linear(size, width, bias=False)
        self.down_proj = nn.Linear(width, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] to [..., H]."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """The decoder layer."""

    def __init__(self, size: int, width: int, intermediate_size: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm = nn.RMSNorm(size, eps), nn.RMSNorm(size, eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.self_attn = Attention(size, width)
        self.mlp = FeedForward(size, intermediate_size)


class EagleHead(nn.Module):
    """A head for a Llama, which begins as the model's last layer behind its last state but one.

    places: the numbers of the model's layers after which states are taken, in ascending order.
    target_ids: int64 [D] in ascending order, the tokens that it can draft. Their rows of the model's output layer
    are its own, and are not trained.
    """

    def __init__(self, model: Any, places: Sequence[int], target_ids: Tensor, folder: Path) -> None:
        super().__init__()
        config = model.config
        self.places, self.target_ids = list(places), target_ids
        self.num_heads = config.num_attention_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.num_heads
        size, width = config.hidden_size, self.num_heads * self.head_dim
        self.fc = nn.Linear(len(places) * size, size, bias=False)
        self.midlayer = Layer(size, width, config.intermediate_size, config.rms_norm_eps)
        self.norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.settings = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": size,
            "intermediate_size": config.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": 1,
            "vocab_size": config.vocab_size,
            "draft_vocab_size": len(target_ids),
            "rms_norm_eps": config.rms_norm_eps,
            "hidden_act": config.hidden_act,
            "max_position_embeddings": config.max_position_embeddings,
            "rope_parameters": config.rope_parameters,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [place - 1 for place in places]},
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.settings, indent=2))
        self._folder = folder
        self._embedding = model.get_input_embeddings().weight.detach().float()
        self._head = model.get_output_embeddings().weight.detach().float()[target_ids]
        cos, sin = model.model.rotary_emb(
            self.norm.weight.detach()[None, None], torch.arange(MAX_LENGTH)[None]
        )
        self._angles = cos[0], sin[0]
        self._begin_as(model)

    @torch.no_grad()
    def _begin_as(self, model: Any) -> None:
        """Take the weights of the model's last layer; nothing comes from token embeddings yet."""
        last, own, size = model.model.layers[-1], self.midlayer, self.settings["hidden_size"]
        self.fc.weight.zero_()
        self.fc.weight[:, -size:] = torch.eye(size)
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(last.self_attn, name).weight.float().view(-1, self.head_dim, size)
            weight = weight.repeat_interleave(self.num_heads // len(weight), 0).flatten(0, 1)
            getattr(own.self_attn, name).weight.copy_(torch.cat([torch.zeros_like(weight), weight], 1))
        own.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(own.mlp, name).weight.copy_(getattr(last.mlp, name).weight)
        own.hidden_norm.weight.copy_(last.input_layernorm.weight)
        own.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        self.norm.weight.copy_(model.model.norm.weight)

    def wanted(self, final: Tensor) -> Tensor:
        """The model's logits [..., D] of the tokens that can be drafted. final: its hidden states [..., H]."""
        return functional.linear(final, self._head.to(final.dtype)).float()

    def forward(self, states: Tensor, token_ids: Tensor, depth: int) -> list[Tensor]:
        """Logits [B, T - 1 - j, D] of the depths j from 0: at place t, of the token at t + 2 + j.

        states: [B, T, 3 H] of the model. token_ids: int64 [B, T].
        """
        layer, logits = self.midlayer, list[Tensor]()
        kept: list[KeysValues] = []
        state = self.fc(states[:, :-1])
        for j in range(depth):
            count = token_ids.shape[1] - 1 - j
            state = state[:, :count]
            embedded = self._embedding[token_ids[:, 1 + j : 1 + j + count]]
            x = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(state.float())], -1)
            y = state + self._attend(x, j, kept)
            state = y + layer.mlp(layer.post_attention_layernorm(y.float()))
            normed = self.norm(state.float())
            logits.append(functional.linear(normed, self._head).float())
        return logits

    def _attend(self, x: Tensor, j: int, kept: list[KeysValues]) -> Tensor:
        """Attention at depth j, whose keys and values are added to those that are kept of the depths before."""
        attention, count = self.midlayer.self_attn, x.shape[1]
        q, k, v = (
            projection(x).view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        cos, sin = (angle[j : j + count] for angle in self._angles)
        q, k = (y * cos + rotated(y) * sin for y in (q, k))
        kept.append((k, v))
        first_k, first_v = (y[:, :, :count] for y in kept[0])
        hidden = torch.ones(count, count, dtype=torch.bool).triu(1)
        scores = (q @ first_k.transpose(2, 3)).float().masked_fill(hidden, -torch.inf)
        own = [(q * k[:, :, :count]).sum(-1, keepdim=True).float() for k, _ in kept[1:]]
        weights = (torch.cat([scores, *own], -1) * self.head_dim**-0.5).softmax(-1)
        out = weights[..., :count] @ first_v.to(weights.dtype)
        for i, (_, v) in enumerate(kept[1:]):
            out = out + weights[..., count + i, None] * v[:, :, :count]
        merged: Tensor = attention.o_proj(out.transpose(1, 2).flatten(2))
        return merged

    def save(self, tokenizer: Path) -> None:
        """Write the checkpoint in bfloat16, and the model's tokenizer beside it."""
        tensors = {name: tensor.detach().bfloat16() for name, tensor in self.state_dict().items()}
        tensors["lm_head.weight"] = self._head.bfloat16()
        tensors["d2t"] = self.target_ids - torch.arange(len(self.target_ids))
        save_file(tensors, self._folder / "model.safetensors")
        shutil.copy(tokenizer, self._folder / "tokenizer.json")


def rotated(x: Tensor) -> Tensor:
    """Heads [..., D] whose halves are exchanged, the second with the other sign."""
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)
