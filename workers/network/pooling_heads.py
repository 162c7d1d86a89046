"""Linear layers after the pooling that a checkpoint holds apart from transformers' modules.

Those of sentence-transformers' Dense modules, of reward models, and classifiers made of rows of the output layer,
as Qwen3-Reranker's: the score of a text is the probability of "yes", not "no", as its next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pagewire.ipc.files.hub import read_json
from pagewire.ipc.gguf.file import is_gguf
from pagewire.ipc.quoting import quoted
from pagewire.kernels.linear import dense_weight, pack
from pagewire.workers.checkpoint.source import Checkpoint
from pagewire.workers.device.interface import Device
from pagewire.workers.errors import LoadError
from pagewire.workers.network.pooler import FUNCTIONS, Dense
from pagewire.workers.network.pooling_spec import PoolingSpec, TokenHead

OUTPUT_LAYERS = ("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight")
"""Where the rows of an output layer lie: in a layer of its own, or in the embedding that it is tied to."""


def load_dense(spec: PoolingSpec, dtype: torch.dtype, device: Device) -> list[Dense]:
    """The linear layers after the pooling.

    Raises:
        LoadError: a file is missing or broken, or a function behind a layer is not served.
    """
    layers = []
    for folder in spec.dense:
        values = read_json(folder / "config.json")
        name = str(values.get("activation_function", "torch.nn.modules.linear.Identity")).rpartition(".")[2]
        if name != "Identity" and name not in FUNCTIONS:
            raise LoadError(f"{folder.name}: the activation {name} is not served: {', '.join(FUNCTIONS)} are")
        source = Checkpoint(folder)
        names = set(source.names)
        if "linear.weight" not in names or not names <= {"linear.weight", "linear.bias"}:
            raise LoadError(
                f"{folder} must hold linear.weight, and linear.bias or not; it holds {sorted(names)}"
            )
        layers.append(dense_layer(source, "linear", name, dtype, device))
    return layers


def dense_layer(source: Checkpoint, name: str, function: str, dtype: torch.dtype, device: Device) -> Dense:
    """The linear layer whose weight, and perhaps bias, have this name, with a function after it or "Identity"."""
    bias = source.read(f"{name}.bias").to(dtype) if f"{name}.bias" in source.names else None
    weight = dense_weight(source.read(f"{name}.weight").to(dtype).clone(), dtype)
    return Dense(pack(weight, bias, device.torch_device), None if function == "Identity" else function)


def load_head(spec: PoolingSpec, folder: Path, dtype: torch.dtype, device: Device) -> list[Dense]:
    """The head of a reward model, or a classifier of rows of the output layer; empty for other models.

    Raises:
        LoadError: the checkpoint lacks it, or a token that it is made of.
    """
    if not spec.head and spec.token_head is None:
        return []
    if is_gguf(str(folder)):
        raise LoadError("a GGUF file holds no head for rewards, and no tokens to make a classifier of")
    source = Checkpoint(folder)
    if spec.token_head is not None:
        rows = dense_weight(rows_of(source, spec.token_head, folder).to(dtype), dtype)
        return [Dense(pack(rows, None, device.torch_device), None)]
    layers = []
    for name, function in spec.head:
        if f"{name}.weight" not in source.names:
            raise LoadError(f"{folder} lacks {name}.weight, a layer of its head for rewards")
        layers.append(dense_layer(source, name, function, dtype, device))
    return layers


def rows_of(source: Checkpoint, head: TokenHead, folder: Path) -> Tensor:
    """The rows [L, H] of an output layer that make a classifier."""
    ids = token_ids(head.tokens, folder)
    name = next((name for name in OUTPUT_LAYERS if name in source.names), None)
    if name is None:
        raise LoadError(f"{folder} holds no output layer of plain numbers to make a classifier of")
    matrix = source.read(name)
    if wrong := [token_id for token_id in ids if not 0 <= token_id < len(matrix)]:
        raise LoadError(f"the output layer has {len(matrix)} tokens, and none of id {wrong[0]}")
    rows = matrix[torch.tensor(ids)]
    return rows.float()[1:] - rows.float()[:1] if head.two_way else rows


def token_ids(tokens: Sequence[str | int], folder: Path) -> list[int]:
    """The ids of tokens.

    Raises:
        LoadError: the tokenizer has no such token, or there is no tokenizer.json to look one up in.
    """
    if all(isinstance(token, int) for token in tokens):
        return [int(token) for token in tokens]
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise LoadError(f"{path} is not there, which the tokens of classifier_from_token are looked up in")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise LoadError(f"{path} cannot be read: {error}") from error
    ids = []
    for token in tokens:
        token_id = token if isinstance(token, int) else tokenizer.token_to_id(token)
        if token_id is None:
            raise LoadError(f"classifier_from_token: the tokenizer has no token {quoted(token)}")
        ids.append(token_id)
    return ids
