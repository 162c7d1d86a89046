"""The part of `LLM` that pools: all prompts in, all results back, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pagewire.frontend import wiring
from pagewire.frontend.api.batch import pool
from pagewire.frontend.api.local_engine import LocalEngine
from pagewire.frontend.api.progress import progress_bar
from pagewire.frontend.requests.inputs import prompts_of
from pagewire.frontend.requests.lora import LoRARequest, for_each
from pagewire.frontend.requests.outputs import batch_error
from pagewire.frontend.requests.pooling.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
    classification_output,
    embedding_output,
)
from pagewire.frontend.text.prompts import PromptType
from pagewire.ipc.compatibility import NAMES, settle
from pagewire.ipc.wire.pooling import PoolingParams, PoolingTask


class OfflinePooling(LocalEngine):
    """An engine that pools batches of prompts, for callers that wait."""

    _request_ids: Iterator[int]

    def _next_id(self) -> str:
        return f"{next(self._request_ids)}"

    def encode(
        self,
        prompts: Any = None,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        pooling_task: PoolingTask | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pool the hidden states of all prompts; the outputs are in their order.

        prompts: as for `generate`. pooling_params: for all, or one for each; None: the model's defaults.
        prompt_token_ids: legacy spelling of token ids as `prompts`.
        truncate_prompt_tokens: of parameters that give none. use_tqdm: as for `generate`.
        pooling_task: what to make of each prompt; None: what the parameters say, or else the model's default.

        Raises:
            ValueError, TypeError: a bad prompt or parameter, or a model that generates; nothing is left running.
            BatchError: (a `RequestError`) the engine ended requests with an error, as for `generate`.
        """
        settle("tokenization_kwargs", tokenization_kwargs, NAMES["LLM.encode(tokenization_kwargs)"])
        if (prompts is None) == (prompt_token_ids is None):
            raise ValueError("give prompts")
        return self._pool(
            prompts_of(prompt_token_ids if prompts is None else prompts),
            pooling_params,
            truncate_prompt_tokens,
            use_tqdm,
            pooling_task,
            lora_request,
        )

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt. Arguments and errors as for `encode`."""
        outputs = self._pool(
            prompts_of(prompts), pooling_params, truncate_prompt_tokens, use_tqdm, "embed", lora_request
        )
        return list(map(embedding_output, outputs))

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of the model's classes for each prompt. Arguments and errors as for `encode`."""
        outputs = self._pool(
            prompts_of(prompts), pooling_params, truncate_prompt_tokens, use_tqdm, "classify", lora_request
        )
        return list(map(classification_output, outputs))

    def reward(
        self,
        prompts: PromptType | Sequence[PromptType],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The rewards of each prompt: a classifier's logits, of the prompt or of each token. See `encode`."""
        return self._pool(
            prompts_of(prompts), pooling_params, truncate_prompt_tokens, use_tqdm, "reward", lora_request
        )

    def score(
        self,
        data_1: Any,
        data_2: Any,
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts fit each other: a score of each pair, of 1 and 1, 1 and n, or n and n texts.

        By a cross-encoder; or else the cosine of two embeddings; or, with embeddings of tokens only (ColBERT), the
        sum of the largest products (MaxSim). Other arguments and errors as for `encode`.
        """
        plan = wiring.ScorePlan(self.info, data_1, data_2)
        pooled = self._pool(
            plan.prompts, pooling_params, truncate_prompt_tokens, use_tqdm, plan.task, lora_request
        )
        scores: list[ScoringRequestOutput] = plan.scores(pooled)
        return scores

    def _pool(
        self,
        prompts: Sequence[Any],
        params: PoolingParams | Sequence[PoolingParams] | None,
        truncate_prompt_tokens: int | None,
        use_tqdm: bool | Callable[..., Any],
        task: str | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> list[PoolingRequestOutput[Any]]:
        each = wiring.pooling_params_for(params, len(prompts), self.info, task, truncate_prompt_tokens)
        adapters = for_each(lora_request, len(prompts))
        with progress_bar(len(prompts), use_tqdm) as tick:
            outputs, failed = pool(self.session, prompts, each, adapters, self._next_id, tick)
        if failed is not None:
            raise batch_error(failed, outputs)
        return outputs
