"""The open requests of a session by id and by key, with those who wait for them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from pagewire.frontend.core.mailbox import Mailbox
from pagewire.frontend.requests.answer_budget import num_logprobs
from pagewire.frontend.requests.outputs import Outputs, RequestState
from pagewire.ipc.wire.messages import Deltas

logger = logging.getLogger("pagewire.frontend")

PORTION = 2048  # log probabilities that are added to requests without a pause: a few milliseconds
DELTA_PORTION = 8  # a delta without any takes as long as these


class Spans(Protocol):
    """Sends a span of each request to a collector; `tracing.py` has one."""

    def begin(self, state: RequestState, model: str, headers: Mapping[str, str] | None) -> None:
        """A request is submitted."""

    def end(self, state: RequestState) -> None:
        """A request has ended."""

    def shutdown(self) -> None:
        """Send what is left."""


class RequestTable:
    """Open requests by id and by key, with the mailboxes and trace spans that belong to them. Not thread-safe.

    tracer: gets their spans; None: nobody does.

    Attributes:
        outputs: states by key, to which deltas are applied. mailboxes: by key.
    """

    def __init__(self, tracer: Spans | None) -> None:
        self.outputs = Outputs()
        self.mailboxes: dict[int, Mailbox] = {}
        self._by_id: dict[str, RequestState] = {}
        self._tracer = tracer

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._by_id.values())

    def has(self, state: RequestState) -> bool:
        """True if the request is open."""
        return self._by_id.get(state.request_id) is state

    def find(self, request_ids: Iterable[str]) -> list[RequestState]:
        """The open requests with these ids."""
        return [self._by_id[name] for name in request_ids if name in self._by_id]

    def add(
        self, state: RequestState, mailbox: Mailbox, model: str, trace_headers: Mapping[str, str] | None
    ) -> None:
        """Add a request, and begin its span.

        Raises:
            ValueError: its id is in use.
        """
        if state.request_id in self._by_id:
            raise ValueError(f"request id {state.request_id!r} is in use")
        self._by_id[state.request_id] = state
        self.outputs.add(state)
        self.mailboxes[state.key] = mailbox
        if self._tracer is not None:
            self._tracer.begin(state, model, trace_headers)

    def drop(self, state: RequestState) -> None:
        """Remove an open request, and end its span."""
        del self._by_id[state.request_id]
        self.outputs.drop(state.key)
        del self.mailboxes[state.key]
        if self._tracer is not None:
            try:
                self._tracer.end(state)
            except Exception:  # a span less; the others go on
                logger.exception("request %.100r: its span could not be sent", state.request_id)

    def shutdown(self) -> None:
        """Send the spans that are left."""
        if self._tracer is not None:
            self._tracer.shutdown()


def portions(message: Deltas) -> Iterator[Deltas]:
    """The output, in order, in parts that take as long as about `PORTION` log probabilities."""
    most = PORTION // DELTA_PORTION
    for begin in range(0, len(message.keys), most):
        part = slice(begin, begin + most)
        yield Deltas([], message.keys[part], message.token_ids[part])
    begin, size, deltas = 0, 0, message.deltas
    for end, delta in enumerate(deltas, 1):
        size += DELTA_PORTION
        if delta.logprobs is not None or delta.prompt_logprobs is not None:
            size += num_logprobs(delta)
        if size >= PORTION or end == len(deltas):
            yield Deltas(deltas[begin:end])
            begin, size = end, 0
