"""The package `acme` of docs/own_models.md, written and installed as its reader would."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

PAGE = Path(__file__).parents[1] / "docs" / "own_models.md"
HIDDEN, HEADS, LAYERS, VOCAB_SIZE = 64, 4, 2, 128
CONFIG = {
    "architectures": ["AcmeForCausalLM"],
    "model_type": "acme",
    "n_layer": LAYERS,
    "n_embd": HIDDEN,
    "num_attention_heads": HEADS,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 128,
    "torch_dtype": "float32",
}


def blocks() -> dict[str, str]:
    """The files of the page, by name."""
    text = PAGE.read_text(encoding="utf-8")
    return dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", text, re.DOTALL))


def install(folder: Path) -> Path:
    """The package in a folder that is on the path: its files, and the metadata that an installer makes of them."""
    for name, content in blocks().items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    group, entry = re.findall(r'entry-points\."(.*)"\]\n(.*)\n', blocks()["pyproject.toml"])[0]
    return entry_point(folder, "acme", group, entry.replace('"', ""))


def entry_point(folder: Path, package: str, group: str, entry: str) -> Path:
    """The folder, with the metadata of an installed package that has an entry point."""
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
    return folder


def write(folder: Path) -> dict[str, Tensor]:
    """A random checkpoint in a folder, in the names of the page's table; its tensors."""
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (VOCAB_SIZE, HIDDEN),
        "head.weight": (VOCAB_SIZE, HIDDEN),
        **{f"transformer.ln_f.{leaf}": (HIDDEN,) for leaf in ("weight", "bias")},
    }
    for layer in range(LAYERS):
        within = {
            "ln.weight": (HIDDEN,),
            "ln.bias": (HIDDEN,),
            "attn.qkv.weight": (3 * HIDDEN, HIDDEN),
            "attn.out.weight": (HIDDEN, HIDDEN),
            "mlp.up.weight": (4 * HIDDEN, HIDDEN),
            "mlp.down.weight": (HIDDEN, 4 * HIDDEN),
        }
        shapes |= {f"transformer.blocks.{layer}.{name}": shape for name, shape in within.items()}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) * 0.15 for name, shape in shapes.items()}
    tensors |= {name: 1 + x for name, x in tensors.items() if name.endswith(("ln.weight", "ln_f.weight"))}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return tensors


def states(tensors: dict[str, Tensor], ids: Tensor) -> Tensor:
    """The model's formulas: hidden states [T, H] of tokens int64 [T]."""
    size = HIDDEN // HEADS
    distances = torch.arange(len(ids)) - torch.arange(len(ids))[:, None]
    slopes = 2.0 ** (-8 / HEADS * torch.arange(1, HEADS + 1))
    bias = (slopes[:, None, None] * distances).masked_fill(distances > 0, -torch.inf)
    x = tensors["transformer.wte.weight"][ids]
    for layer in range(LAYERS):
        prefix = f"transformer.blocks.{layer}."
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        normed = F.layer_norm(x, (HIDDEN,), own["ln.weight"], own["ln.bias"])
        parts = (normed @ own["attn.qkv.weight"].T).chunk(3, -1)
        q, k, v = (part.view(len(ids), HEADS, size).transpose(0, 1) for part in parts)
        weights = (q @ k.transpose(1, 2) * size**-0.5 + bias).softmax(-1)
        mixed = (weights @ v).transpose(0, 1).flatten(1) @ own["attn.out.weight"].T
        x = x + mixed + F.gelu(normed @ own["mlp.up.weight"].T) @ own["mlp.down.weight"].T
    final = tensors["transformer.ln_f.weight"], tensors["transformer.ln_f.bias"]
    return F.layer_norm(x, (HIDDEN,), *final)


def greedy(tensors: dict[str, Tensor], prompt: list[int], num_tokens: int) -> list[int]:
    """Tokens by the formulas, each from a pass over all before it."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int((tensors["head.weight"] @ states(tensors, torch.tensor(ids))[-1]).argmax()))
    return ids[len(prompt) :]
