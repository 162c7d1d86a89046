"""A request and the output of its sequences, as frontends and the core exchange them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pagewire.ipc.wire.budget import MAX_RESUMED_SEQUENCES
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.items import (
    MAX_RETENTIONS,
    Item,
    LogprobRows,
    Prompt,
    RetainedPrefix,
    Retention,
    Task,
    TokenIds,
)
from pagewire.ipc.wire.lora import AdapterSource
from pagewire.ipc.wire.params import Name, SamplingParams


class Request(Item):
    """A request that a frontend submits: a prompt, and a task for it.

    key: chosen by the frontend, unique among its unfinished requests; deltas carry it.
    request_id: the public id, for logs.
    task: parameters of n sequences to generate, or of a pooled result.
    seed: always set (the frontend chooses one if the user gave none); sequence i of n samples with a seed derived
        from (seed, i).
    output_token_ids: the tokens generated so far, for each sequence (a resubmission after the core was lost).
    num_prompt_logprobs: the prompt positions, from position 1 on, whose log probabilities were delivered before.
    age: seconds between its arrival and its submission; the core dates the arrival back by it.
    rank: how many sequences of the same batch (such as the prompts of one HTTP request) come before its own; later
        requests of the tenant may pass those with a high rank.
    tenant: the name of whom it is served for; tenants share the engine. Empty: the frontend is the tenant.
    adapter: the LoRA adapter that it runs with; None: the model alone. `prompt.adapter`, its content, is set by the
        core; in a resubmitted request it is that of the first core, which must be the same.
    retention: prefixes that are to stay cached. Of n sequences the first one's are kept.
    """

    key: int
    request_id: Name
    prompt: Prompt
    task: Task
    seed: int
    eos_token_id: int | None = None
    priority: int = 0
    output_token_ids: Annotated[list[TokenIds], Meta(max_length=MAX_RESUMED_SEQUENCES)] | None = None
    num_prompt_logprobs: int = 0
    age: float = 0.0
    rank: int = 0
    tenant: str = ""
    adapter: AdapterSource | None = None
    retention: Annotated[list[Retention], Meta(max_length=MAX_RETENTIONS)] = []

    @property
    def params(self) -> SamplingParams:
        """The parameters of a request that generates."""
        assert isinstance(self.task, SamplingParams), "the request is for a pooled result"
        return self.task


class RequestTiming(Item):
    """When a sequence reached each state, in seconds on the core's monotonic clock."""

    arrived: float
    scheduled: float
    first_token: float
    finished: float


class TokenDelta(Item):
    """New output of one sequence of a request.

    finish_reason: "stop", "length", "abort" or "error"; None while the sequence continues.
    stop_reason: the stop token, if one of `stop_token_ids` ended the sequence.
    prompt_logprobs: for the next prompt positions (from position 1 on); only for index 0.
    pooled: the result of a request with `PoolingParams`; its finish_reason is "stop".
    num_cached_tokens, timing: set in the first and in the last delta of the sequence.
    error, error_type: why the sequence failed; if it was refused, also the name of the exception ("ValueError",
        "EngineBusyError").
    error_place: the field that the error is about, as its text begins with it (`ipc.errors.FieldError`).
    num_drafts, num_accepted: proposed tokens that were verified for this, and how many of `token_ids` are such.
    adapter: sha256 of the content of its adapter; set with the first token.
    retained: what became of each `Retention` of the request; with the first token, and anew with the last.
    weights: which weights gave its tokens, if they were not always those that the engine has started with: the
        index of an output token, and the version from that one on. With the first token of each, and the last.
    """

    key: int
    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
    pooled: Tensor | None = None
    num_cached_tokens: int | None = None
    timing: RequestTiming | None = None
    error: str | None = None
    error_type: str | None = None
    num_drafts: int = 0
    num_accepted: int = 0
    adapter: bytes = b""
    retained: list[RetainedPrefix] = []
    error_place: str | None = None
    weights: list[tuple[int, str]] = []
