"""The generation of one response: at once, as a stream of events, or in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial

from pagewire.frontend.client import RequestOutput
from pagewire.frontend.server.http import sse
from pagewire.frontend.server.http.errors import APIError, FieldNames, api_error
from pagewire.frontend.server.openai.logprobs import TokenNames
from pagewire.frontend.server.openai.prepared_chat import PreparedChat
from pagewire.frontend.server.responses.field_names import FIELD_NAMES
from pagewire.frontend.server.responses.protocol import ResponseFailure, Status
from pagewire.frontend.server.responses.reader import OutputReader
from pagewire.frontend.server.responses.store import USABLE, ResponseStore, StoredResponse
from pagewire.frontend.server.responses.writer import ResponseWriter
from pagewire.frontend.server.serving.generation_endpoint import Events

logger = logging.getLogger("pagewire.server")

# Codes of failures in the background, by status; others: server_error.
CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class Generation:
    """One response while it is generated.

    chat: the request as one for a chat completion. stored: the response, which grows. writer: of the response.
    on_end: called once the output has ended, and can be gone on with.
    """

    def __init__(
        self,
        chat: PreparedChat,
        stored: StoredResponse,
        store: ResponseStore,
        writer: ResponseWriter,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.service, self.exchange, self._chat = chat.service, chat.exchange, chat
        self.stored, self.store, self.writer = stored, store, writer
        self._on_end = on_end
        self._grown = 0  # bytes by which the output has grown that the store has not counted yet
        tokenizer = chat.service.optional_tokenizer(chat.request.model)
        self._reader = OutputReader(
            chat.new_parser(),
            tokenizer,
            TokenNames(tokenizer, chat.service.options.return_tokens_as_token_ids),
            reasoning=chat.tools.reasoning,
            top_logprobs=(chat.request.top_logprobs or 0) if chat.request.logprobs else None,
        )

    async def steps(self) -> AsyncGenerator[list[bytes], None]:
        """Yield the response's events, step by step.

        Raises:
            Exceptions of the engine, before the first step; a later one becomes an event.
        """
        begun = False
        try:
            async with aclosing(self._chat.outputs()) as outputs:
                async for ((_, output),) in outputs:
                    self.exchange.count(0, output)
                    events = [] if begun else self.writer.start()
                    begun = True
                    yield events + self._read(output)
        except Exception as error:
            if not begun:
                raise
            yield self._fail(error)

    async def whole(self) -> bytes:
        """Return the complete response as JSON."""
        async with aclosing(self.steps()) as steps:
            async for _ in steps:
                pass
        answer = sse.ENCODER.encode(self.stored.response)
        self.keep()
        return answer

    async def stream(self) -> Events:
        """Yield the response's events; all events of a step are one piece."""
        first = self.writer.create()
        async with aclosing(self.steps()) as steps:
            async for events in steps:
                yield b"".join(first + events)
                first = []
        self.keep()

    def start_in_background(self) -> None:
        """Generate the response in a task of its own.

        Raises:
            APIError: there is no room to store it meanwhile.
        """
        self.stored.add_events(self.writer.create() + self.writer.queue())
        self.stored.task = asyncio.create_task(self._run())
        self.exchange.lease.keep_until(self.stored.task)
        self.stored.task.add_done_callback(self.service.hold())
        if not self.store.put(self.stored):
            self.stored.task.cancel()
            raise no_room(self.store.limit)

    async def _run(self) -> None:
        """Generate the response in a task, which is cancelled to end it early."""
        try:
            async with aclosing(self.steps()) as steps:
                async for events in steps:
                    self.stored.add_events(events)
                    self._count_growth(events)
        except asyncio.CancelledError:
            self.stored.add_events(self._end("cancelled"))
        except Exception as error:
            self.stored.add_events(self._fail(error))
        self._keep_at_last()
        if not self.service.options.disable_log_requests:
            failure = self.stored.response.error
            why = None if failure is None else failure.message
            self.exchange.log(200, why, self.service.options.max_log_len)

    def keep(self) -> None:
        """Store the response, if it is to be stored; for a WebSocket alone, until that ends."""
        response, socket = self.stored.response, self.stored.socket
        if not response.store and socket is None:
            return
        if not self.store.put(self.stored):
            logger.warning("response %s is not stored: it is too large", response.id)
        elif socket is not None:
            socket.at_end(partial(self.store.forget, response.id))

    def _count_growth(self, events: list[bytes]) -> None:
        """Count what a step has added to the stored response.

        Raises:
            APIError: there is no room.
        """
        grown, self._grown = self._grown, 0
        if self.stored.events is not None:
            grown += sum(map(len, events))
        if not self.store.grow(self.stored, grown):
            raise no_room(self.store.limit)

    def _keep_at_last(self) -> None:
        """Store a background response that has ended; without its output if there is no room for that."""
        if self.store.put(self.stored):
            return
        response, reported = self.stored.response, no_room(self.store.limit)
        response.output, self.stored.events = [], None
        response.status, response.error = "failed", ResponseFailure("server_error", reported.message)
        self.keep()

    def _read(self, output: RequestOutput) -> list[bytes]:
        """Return the events of an increment of the output, which has one part."""
        (part,) = output.outputs
        delta, logprobs = self._reader.read(part)
        if self.stored.task is not None:
            self._grown += len(sse.ENCODER.encode((delta, logprobs)))
        events = self.writer.read(delta, logprobs)
        if part.finished():
            events += self._end("incomplete" if part.finish_reason == "length" else "completed")
        return events

    def _end(self, status: Status) -> list[bytes]:
        events = self.writer.end(status, self.exchange.usage(), self._reader.reasoning_tokens)
        if status in USABLE:
            self._on_end()
        return events

    def _fail(self, error: Exception) -> list[bytes]:
        reported = api_error(error, FieldNames(FIELD_NAMES))
        if reported.status == 500:
            logger.error("response %s failed", self.stored.response.id, exc_info=error)
        code = CODES.get(reported.status, "server_error")
        return self.writer.fail(code, reported.message, self.exchange.usage(), self._reader.reasoning_tokens)


def no_room(limit: int) -> APIError:
    """Return the error for a response that the store has no room for."""
    message = (
        f"there is no room to keep a response: all of {limit} bytes (--response-store-bytes) are taken by "
        "responses that are being generated"
    )
    return APIError(429, message, code="response_store_full")


async def stop_generation(stored: StoredResponse) -> None:
    """End a response that is generated in the background, and wait until it has ended."""
    if stored.busy:
        assert stored.task is not None
        stored.task.cancel()
        await asyncio.wait((stored.task,))
