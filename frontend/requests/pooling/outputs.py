"""The public outputs of requests that pool."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from pagewire.frontend.requests.outputs import RequestMetrics
from pagewire.ipc.wire.codec import Tensor

T = TypeVar("T")


class PoolingOutput:
    """The values that were pooled of a prompt: a list of floats, or one list for each token.

    tensor: the values as they came, float32 [size] or [tokens, size].
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @cached_property
    def data(self) -> list[Any]:
        """The values."""
        flat = self.tensor.tolist()
        if len(self.tensor.shape) == 1:
            return flat
        size = self.tensor.shape[1]
        return [flat[start : start + size] for start in range(0, len(flat), size)]

    @property
    def embedding(self) -> list[Any]:
        """Older name of `data`, for models that embed."""
        return self.data

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.tensor == self.tensor

    def __hash__(self) -> int:
        return hash(self.tensor)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.tensor.shape})"


class EmbeddingOutput(PoolingOutput):
    """An embedding."""

    @property
    def embedding(self) -> list[float]:
        """Its elements."""
        return self.data

    @property
    def hidden_size(self) -> int:
        """How many they are."""
        return self.tensor.shape[0]


class ClassificationOutput(PoolingOutput):
    """Probabilities or scores of classes."""

    @property
    def probs(self) -> list[float]:
        """One for each class."""
        return self.data

    @property
    def num_classes(self) -> int:
        """How many there are."""
        return self.tensor.shape[0]


@dataclass
class ScoringOutput:
    """How well two texts fit each other."""

    score: float


@dataclass
class PoolingRequestOutput(Generic[T]):
    """The result of a request to pool.

    Attributes:
        request_id: the caller's id of the request. outputs: the result.
        prompt_token_ids: the tokens that were computed; of a score by two embeddings, those of both texts.
        finished: always True. num_cached_tokens: prompt tokens whose KV was in the prefix cache.
        metrics: times of the request; None of a score by two embeddings.
        weights_version: of the weights that gave it; empty: those that the engine has started with.
    """

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    weights_version: str = ""

    @property
    def id(self) -> str:
        """The same as `request_id`."""
        return self.request_id

    def become(self, kind: type[PoolingRequestOutput[Any]], outputs: Any) -> Any:
        """The same request's result as another kind of output."""
        return kind(
            self.request_id,
            outputs,
            self.prompt_token_ids,
            True,
            self.num_cached_tokens,
            self.metrics,
            self.weights_version,
        )


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The embedding of a prompt."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The classes of a prompt."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The score of a pair of texts."""


def embedding_output(output: PoolingRequestOutput[Any]) -> EmbeddingRequestOutput:
    """A result as an embedding."""
    return output.become(EmbeddingRequestOutput, EmbeddingOutput(output.outputs.tensor))  # type: ignore[no-any-return]


def classification_output(output: PoolingRequestOutput[Any]) -> ClassificationRequestOutput:
    """A result as scores of classes."""
    return output.become(ClassificationRequestOutput, ClassificationOutput(output.outputs.tensor))  # type: ignore[no-any-return]
