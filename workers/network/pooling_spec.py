"""How a model pools, as plain data; `pooling_files.py` reads it from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class TokenHead:
    """A classifier made of the output layer's rows of some tokens.

    tokens: as the vocabulary has them, or ids. two_way: of two tokens, one score: the probability of the second.
    """

    tokens: tuple[str | int, ...]
    two_way: bool = False


@dataclass(frozen=True)
class PoolingSpec:
    """How a model pools.

    kind: "embed", "classify" (one result of a prompt) or "token_classify". pooling_type: "LAST", "MEAN" or "CLS".
    encoder: its tokens attend to later ones, too. dense: folders of linear layers behind the pooling.
    per_token: it has an embedding for each token only, as ColBERT. activation: of scores of classes.
    max_length: tokens, if the checkpoint gives fewer than the model takes.
    head: linear layers for rewards, by name, with the function behind each. token_head: a classifier of tokens.
    step_tag_id: rewards are those of tokens of this id. rewards_activated: they are probabilities by default.
    """

    kind: str
    pooling_type: str
    encoder: bool
    normalize: bool = True
    dense: tuple[Path, ...] = ()
    per_token: bool = False
    activation: str = "softmax"
    max_length: int | None = None
    lower_case: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    head: tuple[tuple[str, str], ...] = ()
    token_head: TokenHead | None = None
    step_tag_id: int | None = None
    rewards_activated: bool = False
