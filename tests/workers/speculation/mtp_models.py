"""Tiny checkpoints with multi-token-prediction layers, and what these draft by a plain formula."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tests.workers.architectures import GROUPED, LATER_EXPERTS, MLA, VOCAB_SIZE, Architecture
from tests.workers.speculation.speculating import Proposal

NUM_LAYERS = 2  # of the model itself
FIELDS = {
    "deepseek_v3": MLA | LATER_EXPERTS,
    "glm4_moe": GROUPED | LATER_EXPERTS,
    "glm4_moe_lite": MLA | LATER_EXPERTS,
}


def write_mtp(
    folder: Path,
    name: str,
    num_mtp: int = 1,
    dtype: str = "float32",
    *,
    copies: bool = False,
    own: bool = False,
) -> Path:
    """A random model with such layers: they are layers of a larger model, with their further parts.

    copies: the checkpoint holds the model's embedding and output layer in each of them again. own: others.
    """
    more = NUM_LAYERS + num_mtp
    Architecture(name, FIELDS[name] | {"num_hidden_layers": more}).write(folder, seed=3, dtype=dtype)
    tensors = load_file(folder / "model.safetensors")
    generator, size = torch.Generator().manual_seed(5), tensors["model.norm.weight"].numel()

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(tensors["model.norm.weight"].dtype)

    for layer in range(NUM_LAYERS, more):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.eh_proj.weight"] = random(size, 2 * size) / size**0.5
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{prefix}.{norm}.weight"] = 1 + random(size) / 4
        if copies or own:
            embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
            tensors[f"{prefix}.embed_tokens.weight"] = random(VOCAB_SIZE, size) if own else embedding.clone()
            tensors[f"{prefix}.shared_head.head.weight"] = random(VOCAB_SIZE, size) if own else head.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("num_mtp_layers", None)
    config |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": num_mtp}
    if "mlp_layer_types" in config:
        config["mlp_layer_types"] = config["mlp_layer_types"][:NUM_LAYERS]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class MtpOracle:
    """The layers in plain PyTorch around transformers' own decoder layers, in float32, without a cache."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder)
        self.num_mtp = config.num_nextn_predict_layers
        config.num_hidden_layers += self.num_mtp
        if getattr(config, "mlp_layer_types", None) is not None:
            config.mlp_layer_types = [*config.mlp_layer_types, *["sparse"] * self.num_mtp]
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
        self.base: Any = model.model
        self.blocks = list(self.base.layers[NUM_LAYERS:])
        del self.base.layers[NUM_LAYERS:]
        self.base.config.num_hidden_layers = NUM_LAYERS
        self.weights = {name: t.float() for name, t in load_file(folder / "model.safetensors").items()}

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """The likeliest tokens after these."""
        state = self.base(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state
        ids, drafts = tokens[1:], list[int]()
        for number in range(count):
            index = min(number, self.num_mtp - 1)
            out = self.layer(index, state, ids)
            head = self.weight(index, "shared_head.head.weight", "lm_head.weight")
            drafts.append(int((out[0, -1] @ head.T).argmax()))
            if number < self.num_mtp - 1:  # the next layer: a token later at each position
                state, ids = out, [*ids[1:], drafts[-1]]
            else:  # the last layer again: one position more
                state, ids = torch.cat([state, out[:, -1:]], 1), [*ids, drafts[-1]]
        return drafts

    def layer(self, index: int, state: Tensor, token_ids: list[int]) -> Tensor:
        """Outputs [1, T, H] at all positions."""
        table = self.weight(index, "embed_tokens.weight", "model.embed_tokens.weight")
        halves = [self.norm(index, "enorm", table[token_ids][None]), self.norm(index, "hnorm", state)]
        x = torch.cat(halves, -1) @ self.weight(index, "eh_proj.weight").T
        at = torch.arange(len(token_ids))[None]
        angles = self.base.rotary_emb(x, at)
        out = self.blocks[index](x, attention_mask=None, position_ids=at, position_embeddings=angles)
        return self.norm(index, "shared_head.norm", out[0] if isinstance(out, tuple) else out)

    def norm(self, index: int, name: str, x: Tensor) -> Tensor:
        eps = self.base.config.rms_norm_eps
        return functional.rms_norm(x, x.shape[-1:], self.weight(index, f"{name}.weight"), eps)

    def weight(self, index: int, name: str, shared: str = "") -> Tensor:
        """A layer's own weight, or else the model's."""
        own = f"model.layers.{NUM_LAYERS + index}.{name}"
        return self.weights[own if own in self.weights else shared]

    def check(self, proposals: list[Proposal]) -> None:
        """Assert that each draft is the likeliest token."""
        assert proposals
        for proposal in proposals:
            assert self.drafts(proposal.before, len(proposal.drafts)) == proposal.drafts
