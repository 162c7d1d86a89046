"""Which tensors of a checkpoint are of its multi-token-prediction (MTP) layers. Imports no torch.

The layers lie behind those of the model, with numbers that go on: `model.layers.61.` where the model has 61. A
projection of their own, `eh_proj`, tells them from layers that config.json should have counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pagewire.workers.checkpoint.headers import Headers

PROJECTION = re.compile(r"((?:.+\.)?layers\.\d+\.)eh_proj\.")
COPIES = ("embed_tokens.", "shared_head.head.")
"""Parts that are the model's own embedding and output layer, as a rule, and are then taken from there."""


def mtp_prefixes(names: Iterable[str]) -> tuple[str, ...]:
    """What the names of the tensors of each MTP layer begin with, in their order in the checkpoint."""
    found = (PROJECTION.match(name) for name in names)
    return tuple(dict.fromkeys(match[1] for match in found if match is not None))


def divided(headers: Headers) -> tuple[Headers, Headers]:
    """The headers of a model without its MTP layers, and the headers of these layers as a model of their own."""
    prefixes = mtp_prefixes(tensor.name for tensor in headers.tensors)
    copies = tuple(prefix + part for prefix in prefixes for part in COPIES)
    own, layers = [], []
    for tensor in headers.tensors:
        if not tensor.name.startswith(prefixes):
            own.append(tensor)
        elif not tensor.name.startswith(copies):
            layers.append(tensor)
    config = {**headers.config, "num_hidden_layers": len(prefixes)}
    return (
        Headers(headers.config, own, headers.num_files, headers.form),
        Headers(config, layers, headers.num_files, headers.form),
    )


def without_mtp(names: Iterable[str]) -> Sequence[str]:
    """The names of tensors that belong to no MTP layer."""
    names = list(names)
    prefixes = mtp_prefixes(names)
    return [name for name in names if not name.startswith(prefixes)]
