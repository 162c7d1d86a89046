"""The state of a request that pools, until its one output is taken."""

from __future__ import annotations

from typing import Any

from pagewire.frontend.requests.outputs import RequestState
from pagewire.frontend.requests.pooling.outputs import PoolingOutput, PoolingRequestOutput
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.messages import Request, TokenDelta


class PooledState(RequestState):
    """State of an unfinished request that pools; see `RequestState`. It generates nothing."""

    def __init__(self, request: Request) -> None:
        self._start(request)
        self._outputs = []
        self._num_live = 1
        self._tensor: Tensor | None = None
        self._reason: str | None = None
        self._taken = False
        self._weights_version = ""

    @property
    def num_outputs(self) -> int:
        """One."""
        return 1

    @property
    def finish_reasons(self) -> list[str | None]:
        """The reason of its end; None while it runs."""
        return [self._reason]

    @property
    def output_token_ids(self) -> list[list[int]]:
        """There are none, so that the request starts anew on another core."""
        return []

    @property
    def has_output(self) -> bool:
        """True at its end."""
        return self.finished

    def apply(self, delta: TokenDelta) -> bool:
        """See `RequestState.apply`."""
        if delta.index != 0 or self.finished:
            return False
        if delta.num_cached_tokens is not None:
            self._num_cached_tokens = delta.num_cached_tokens
        if delta.weights:
            self._weights_version = delta.weights[-1][1]
        if delta.pooled is not None:  # a copy, since the message may hold a thousand others
            self._tensor = Tensor(delta.pooled.dtype, delta.pooled.shape, bytes(delta.pooled.data))
        if delta.error is not None:
            self.error, self.error_type, self.error_place = delta.error, delta.error_type, delta.error_place
        if delta.finish_reason is not None or delta.error is not None:
            self._reason, self._num_live = delta.finish_reason or "error", 0
        self._clock(delta.timing)
        return False

    def end(self, finish_reason: str) -> None:
        """See `RequestState.end`."""
        self._reason = self._reason or finish_reason
        super().end(finish_reason)

    def fail(self, error: Exception) -> None:
        """See `RequestState.fail`."""
        self._reason = self._reason or "error"
        super().fail(error)

    def take(self) -> Any:
        """The result, as `PoolingRequestOutput`, once; None before the end.

        Its `outputs` is None if the request ended without a result: it was aborted, or failed.
        """
        if self._taken or not self.finished:
            return None
        self._taken = True
        outputs: Any = None if self._tensor is None else PoolingOutput(self._tensor)
        return PoolingRequestOutput(
            self.request_id,
            outputs,
            self.request.prompt.token_ids,
            num_cached_tokens=self._num_cached_tokens or 0,
            metrics=self.metrics,
            weights_version=self._weights_version,
        )
