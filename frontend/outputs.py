"""What comes back: the public outputs, and the state that deltas are folded into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagewire.frontend.tokenizer import Tokenizer
from pagewire.ipc.messages import SubmitRequest, TokenDelta


@dataclass
class RequestMetrics:
    """When things happened, in seconds since the epoch; `time_in_queue` is a duration."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    time_in_queue: float | None = None


@dataclass
class CompletionOutput:
    """One of the n outputs of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None

    def finished(self) -> bool:
        """True once it has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The state of a request, or (DELTA) what is new of it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: Any
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: Any = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None


class RequestState:
    """A live request: deltas go in with `apply`, outputs come out with `take`.

    error: why a sequence of it failed.
    """

    key: int
    request_id: str
    finished: bool
    error: str | None

    def __init__(self, request: SubmitRequest, prompt_text: str | None, tokenizer: Tokenizer | None) -> None:
        raise NotImplementedError

    @property
    def output_token_ids(self) -> list[list[int]]:
        """All tokens generated so far, per sequence (for a resubmission)."""
        raise NotImplementedError

    def apply(self, delta: TokenDelta) -> bool:
        """Fold a delta in. True if a stop string has just ended that sequence: the core must drop it."""
        raise NotImplementedError

    def take(self) -> RequestOutput | None:
        """What is new since the last take, by `output_kind`; None if nothing is."""
        raise NotImplementedError

    def fail(self, error: str, finish_reason: str = "error") -> None:
        """End what still runs of the request."""
        raise NotImplementedError


class Outputs:
    """The one loop over deltas: live requests by key."""

    def __init__(self) -> None:
        self.states: dict[int, RequestState] = {}

    def add(self, state: RequestState) -> None:
        """From now on, deltas for its key go to it."""
        raise NotImplementedError

    def drop(self, key: int) -> RequestState | None:
        """Forget a request; later deltas for its key are ignored."""
        raise NotImplementedError

    def process(self, deltas: list[TokenDelta]) -> tuple[list[RequestState], list[tuple[int, int]]]:
        """Fold deltas in; finished requests are forgotten.

        Returns the requests touched, each once, and the sequences (key, index) that the core must drop.
        """
        raise NotImplementedError

    def fail(self, error: Exception) -> list[RequestState]:
        """End all live requests with this error, forget them, and return them."""
        raise NotImplementedError
