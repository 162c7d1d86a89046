"""Scores of pairs of texts: by a cross-encoder, or of two embeddings, or of the embeddings of their tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pagewire.frontend.requests.inputs import prompts_of
from pagewire.frontend.requests.pooling.inputs import pooling_of
from pagewire.frontend.requests.pooling.outputs import (
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from pagewire.frontend.text.prompts import TextPair
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.messages import EngineInfo
from pagewire.ipc.wire.pooling import PoolingInfo

QUERY_TOKENS = 256  # of a query, compared with a document at a time: both may be as long as the context


def scoring_info(info: EngineInfo) -> PoolingInfo:
    """The pooling of an engine that can score pairs.

    Raises:
        ValueError: its model generates, or is a classifier of several classes.
    """
    pooling = pooling_of(info)
    if not (pooling.cross_encoder or pooling.late_interaction or "embed" in pooling.tasks):
        raise ValueError(
            f"{info.served_model_names[0]} classifies into {pooling.size} classes and does not score pairs: that "
            "takes a cross-encoder with one label, or embeddings"
        )
    return pooling


def pairs_of(data_1: Any, data_2: Any) -> tuple[list[Any], list[Any]]:
    """Both sides as lists: one, or as many as on the other side.

    Raises:
        ValueError: an empty side, or numbers that do not fit. TypeError: something else than prompts.
    """
    first, second = prompts_of(data_1), prompts_of(data_2)
    if not first or not second:
        raise ValueError("there must be at least one text on each side")
    if len(first) not in (1, len(second)):
        raise ValueError(
            f"{len(first)} texts cannot be scored against {len(second)}: give one, or as many on both sides"
        )
    return first, second


def text_pairs(first: Sequence[Any], second: Sequence[Any]) -> list[TextPair]:
    """The pairs for a cross-encoder.

    Raises:
        TypeError: something is no text.
    """
    if len(first) == 1:
        first = list(first) * len(second)
    return [TextPair(scored_text(a), scored_text(b)) for a, b in zip(first, second, strict=True)]


def scored_text(prompt: Any) -> str:
    """The text of a prompt.

    Raises:
        TypeError: it has none.
    """
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
    if not isinstance(text, str):
        raise TypeError("a cross-encoder scores texts, not token ids")
    return text


class ScorePlan:
    """A plan to score pairs of texts: the prompts to pool, and the scores of the results.

    task, prompts: to pool, such as `encode` takes them.

    Raises:
        ValueError: a side is empty, their numbers do not fit, or the model scores no pairs.
        TypeError: something else than prompts, or than texts for a cross-encoder.
    """

    def __init__(self, info: EngineInfo, data_1: Any, data_2: Any) -> None:
        self._pooling = scoring_info(info)
        first, second = pairs_of(data_1, data_2)
        self._num_first = len(first)
        self.prompts: list[Any]
        if self._pooling.cross_encoder:
            self.task, self.prompts = "score", text_pairs(first, second)
        else:
            self.task = "token_embed" if self._pooling.late_interaction else "embed"
            self.prompts = first + second

    def scores(self, outputs: Sequence[PoolingRequestOutput[Any]]) -> list[ScoringRequestOutput]:
        """The score of each pair, given the results of `prompts`."""
        if self._pooling.cross_encoder:
            return list(map(of_cross_encoder, outputs))
        compare = max_sim if self._pooling.late_interaction else cosine
        first, second = list(outputs[: self._num_first]), outputs[self._num_first :]
        if len(first) == 1:
            first *= len(second)
        return [
            ScoringRequestOutput(
                f"{a.request_id}_{b.request_id}",
                ScoringOutput(compare(a.outputs, b.outputs)),
                a.prompt_token_ids + b.prompt_token_ids,
                num_cached_tokens=a.num_cached_tokens + b.num_cached_tokens,
            )
            for a, b in zip(first, second, strict=True)
        ]


def of_cross_encoder(output: PoolingRequestOutput[Any]) -> ScoringRequestOutput:
    """A cross-encoder's result as a score."""
    return output.become(ScoringRequestOutput, ScoringOutput(output.outputs.data[0]))  # type: ignore[no-any-return]


def cosine(a: PoolingOutput, b: PoolingOutput) -> float:
    """The cosine of the angle between two embeddings; 0 if one has length 0."""
    x, y = a.tensor.tolist(), b.tensor.tolist()  # `data` would keep the numbers of all texts
    length = math.sqrt(math.fsum(v * v for v in x)) * math.sqrt(math.fsum(v * v for v in y))
    return math.fsum(v * w for v, w in zip(x, y, strict=True)) / length if length else 0.0


def max_sim(query: PoolingOutput, document: PoolingOutput) -> float:
    """The sum over the query's tokens of each one's largest product with a token of the document (ColBERT).

    Raises:
        ValueError: numpy is not installed.
    """
    try:
        import numpy as np  # hundreds of thousands of products: only here, so that attaching stays light
    except ModuleNotFoundError:
        raise ValueError("scores of a late-interaction model need the package numpy") from None

    def rows(tensor: Tensor) -> Any:
        return np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)

    tokens, others = rows(query.tensor), rows(document.tensor).T
    parts = (tokens[start : start + QUERY_TOKENS] @ others for start in range(0, len(tokens), QUERY_TOKENS))
    return float(sum(part.max(axis=1).sum() for part in parts))
