"""Pooling: which result of a prompt's hidden states is requested, and which ones an engine can make."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from pagewire.ipc.bounds import check_fields, unknown_name
from pagewire.ipc.errors import FieldValueError
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.params import Name, TruncatedLength

PoolingTask: TypeAlias = Literal[
    "encode", "embed", "classify", "reward", "score", "token_embed", "token_classify"
]
PoolingType: TypeAlias = Literal["LAST", "MEAN", "CLS"]
TASKS = ("encode", "embed", "classify", "reward", "score", "token_embed", "token_classify")
ENGINE_TASKS = ("embed", "token_embed", "classify", "token_classify")
"""The tasks that an engine runs; a frontend asks for the others as one of these."""
TOKEN_TASKS = ("token_embed", "token_classify")
POOLING_TYPES = ("LAST", "MEAN", "CLS")
MAX_POOLED_BYTES = 64 << 20  # of one result, such as a vector for each token of a long prompt

Dimensions: TypeAlias = Annotated[int, Meta(ge=1)]
Position: TypeAlias = Annotated[int, Meta(ge=0)]


class PoolingParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, tag="pooling"):
    """How to pool the hidden states of a prompt into one result. None: as the model's checkpoint says.

    Attributes:
        truncate_prompt_tokens: keep only this many tokens at the beginning of the prompt, special tokens included;
            -1: what the model takes.
        dimensions: elements of an embedding; for models that were trained for fewer (Matryoshka).
        normalize: scale embeddings to length 1.
        activation: give probabilities or scores, not logits, of classes.
        softmax: the older name of `activation`.
        task: what to make of the prompt: see `PoolingTask`.
        prompt_name: the name of one of the model's prompts, such as "query", which is put before the text.
        all_tokens: the result depends on the hidden states of all tokens (a mean, a vector per token), not only on
            the last; so no cached prefix can be skipped. Filled in by the frontend.
        second_segment: the first token of the second text of a pair, which has token type 1; 0: there is none.
            Filled in by the frontend.

    Raises:
        ValueError: a value out of its range. TypeError: a value of the wrong type.
    """

    truncate_prompt_tokens: TruncatedLength | None = None
    dimensions: Dimensions | None = None
    normalize: bool | None = None
    activation: bool | None = None
    softmax: bool | None = None
    task: str | None = None
    prompt_name: Name | None = None
    all_tokens: bool = False
    second_segment: Position = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.task is not None and self.task not in TASKS:
            raise ValueError(
                f"{unknown_name('pooling task', self.task, TASKS)}; there are {', '.join(TASKS)}"
            )
        if self.truncate_prompt_tokens == 0:
            raise FieldValueError("truncate_prompt_tokens", "must be -1 or at least 1, got 0")
        if self.softmax is not None:
            if self.activation not in (None, self.softmax):
                raise FieldValueError("softmax", "is the older name of activation: give one of them")
            self.activation, self.softmax = self.softmax, None

    def clone(self) -> PoolingParams:
        """A copy."""
        return msgspec.structs.replace(self)


class PoolerConfig(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Settings in place of the pooling that a checkpoint describes; None: as it is there.

    Attributes:
        pooling_type: "LAST", "MEAN" or "CLS": which tokens' hidden states make the result.
        normalize: scale embeddings to length 1. dimensions: default of `PoolingParams.dimensions`.
        activation: default of `PoolingParams.activation`; softmax: its older name.
        step_tag_id: give rewards for tokens of this id only, which end the steps of an answer; with the pooling
            type "STEP", or without one.
        returned_token_ids: the classes of each token are these tokens, as the next one by the output layer.

    Raises:
        ValueError: a value out of its range. TypeError: a value of the wrong type.
    """

    pooling_type: str | None = None
    normalize: bool | None = None
    dimensions: Dimensions | None = None
    activation: bool | None = None
    softmax: bool | None = None
    step_tag_id: Position | None = None
    returned_token_ids: Annotated[list[Position], Meta(min_length=1)] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.pooling_type is not None and self.pooling_type.upper() not in (*POOLING_TYPES, "STEP"):
            raise ValueError(
                f"pooling_type must be one of {', '.join(POOLING_TYPES)} or STEP, got {quoted(self.pooling_type)}"
            )
        if (self.pooling_type or "").upper() == "STEP" and self.step_tag_id is None:
            raise ValueError("pooling_type STEP needs step_tag_id, the token that ends a step")
        if self.softmax is not None:
            self.activation, self.softmax = self.softmax, None

    @classmethod
    def read(cls, value: Any) -> PoolerConfig:
        """The settings in a dict, in another `PoolerConfig`, or in nothing.

        Raises:
            ValueError: an unknown name. TypeError: something else. And as the class.
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            raise TypeError(f"pooler_config must be a PoolerConfig or a dict, got {quoted(value)}")
        if unknown := [name for name in value if name not in cls.__struct_fields__]:
            raise ValueError(unknown_name("field of pooler_config", unknown[0], cls.__struct_fields__))
        return cls(**value)


class PoolingInfo(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The pooling of an engine's model.

    Attributes:
        tasks: those of `ENGINE_TASKS` that it serves; the first is its default.
        pooling_type: one of `PoolingType`. size: elements of an embedding, or number of labels.
        whole_prompts: its model attends to later tokens too, so that a prompt is computed in one step.
        normalize, activation, dimensions: the defaults of these parameters.
        matryoshka: embeddings may have fewer dimensions; those of `matryoshka_dimensions`, or any if that is empty.
        labels: names of the classes. prompts: texts that may be put before a text, by name.
        default_prompt_name: the prompt of texts for which none is named.
        token_types: the two texts of a pair have different token types.
        late_interaction: scores are made of embeddings of tokens.
        lower_case: texts are lower-cased before they are tokenized.
        rewards_activated: rewards are probabilities, unless `activation` says otherwise.
    """

    tasks: list[str]
    pooling_type: str
    size: int
    whole_prompts: bool = False
    normalize: bool = True
    activation: bool = True
    dimensions: int | None = None
    matryoshka: bool = False
    matryoshka_dimensions: list[int] = []
    labels: list[str] = []
    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None
    token_types: bool = False
    late_interaction: bool = False
    lower_case: bool = False
    rewards_activated: bool = False

    @property
    def cross_encoder(self) -> bool:
        """True if it scores pairs of texts by itself."""
        return "classify" in self.tasks and self.size == 1

    def needs_all_tokens(self, task: str) -> bool:
        """True if the result of one of `ENGINE_TASKS` depends on the hidden states of all tokens."""
        return task in TOKEN_TASKS or self.pooling_type != "LAST"

    def result_bytes(self, params: PoolingParams, num_tokens: int) -> int:
        """The size of the result of a prompt with this many tokens, in float32. params: completed."""
        each = num_tokens if params.task in TOKEN_TASKS else 1
        return 4 * (params.dimensions or self.size) * each

    def check(self, params: PoolingParams, num_tokens: int) -> None:
        """Check completed parameters against this engine.

        num_tokens: of the prompt.

        Raises:
            ValueError: the engine cannot do it; the text says why.
        """
        task = params.task
        if task not in self.tasks:
            raise ValueError(
                f"this model does not serve the task {task!r}, it serves {', '.join(self.tasks)}"
            )
        if params.all_tokens != self.needs_all_tokens(task):
            raise FieldValueError(
                "all_tokens", f"must be {self.needs_all_tokens(task)} for {task} with this model"
            )
        if params.second_segment and (not self.token_types or params.second_segment >= num_tokens):
            raise FieldValueError(
                "second_segment", f"={params.second_segment}: there is no such segment with this model"
            )
        self._check_dimensions(params.dimensions, task)
        size = self.result_bytes(params, num_tokens)
        if size > MAX_POOLED_BYTES:
            raise ValueError(
                f"the result of {num_tokens} tokens would have {size} bytes, over the limit of {MAX_POOLED_BYTES}: "
                "send a shorter prompt"
            )

    def _check_dimensions(self, dimensions: int | None, task: str) -> None:
        if dimensions is None:
            return
        if task not in ("embed", "token_embed"):
            raise FieldValueError("dimensions", f"are those of embeddings, the task is {task}")
        if not self.matryoshka and dimensions != self.size:
            raise FieldValueError(
                "dimensions",
                f"={dimensions}: this model's embeddings have {self.size} dimensions and were not "
                "trained for fewer; hf_overrides={'is_matryoshka': True} says that they were",
            )
        if dimensions > self.size:
            raise FieldValueError(
                "dimensions", f"={dimensions}: this model's embeddings have {self.size} dimensions"
            )
        if self.matryoshka_dimensions and dimensions not in self.matryoshka_dimensions:
            allowed = ", ".join(map(str, self.matryoshka_dimensions))
            raise FieldValueError("dimensions", f"={dimensions}: this model was trained for {allowed}")
