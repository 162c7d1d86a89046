"""State of a generation request while it is served: counts, cancellation, and its log line."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from asyncio import FIRST_COMPLETED
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from pagewire.frontend.client import RequestMetrics, RequestOutput
from pagewire.frontend.server.http.body import ClientLeftError
from pagewire.frontend.server.http.errors import NO_RETRY, APIError
from pagewire.frontend.server.http.tenants import Lease, tenant_of
from pagewire.frontend.server.serving.answer_memory import AnswerMemory
from pagewire.frontend.server.serving.retention import warn_of_refusals
from pagewire.frontend.server.serving.socket import SocketSession
from pagewire.frontend.server.serving.usage import CompletionTokensDetails, PromptTokensDetails, Usage
from pagewire.ipc.quoting import MAX_QUOTED, shortened
from pagewire.ipc.wire.budget import SMALL_POOLED_BYTES
from pagewire.ipc.wire.items import RetainedPrefix

logger = logging.getLogger("pagewire.server")

T = TypeVar("T")

NOT_IN_IDS = re.compile(r"[^A-Za-z0-9_.-]")  # ids are parts of URLs
MAX_NAME = 64  # characters of a client's name of a request that become a part of its id


class Exchange:
    """State of one generation request.

    Attributes:
        id: unique id, used in the response and in the engine. given_id: value of the X-Request-Id header of the
            response, which is the client's own if it sent one.
        client_id: value of the X-Request-Id header of the request; "": none.
        tenant: for whom it is served. lease: what it has in flight.
        socket: the WebSocket that it came by; None: it is a request of HTTP.
        headers: the request's headers. created: time of arrival, in seconds since the epoch.
        num_prompt, num_cached, num_output: token counts. reasons: finish reasons, in order of arrival.
        retained: what became of the wishes that the prompt stays cached.
        prompt: text or token ids of the first prompt, for the log. user: the request's `user`, for the log.
    """

    def __init__(self, prefix: str, scope: Scope) -> None:
        self._prefix, self._random = prefix, uuid.uuid4().hex
        self.client_id: str = scope["client_request_id"]
        self.id = self._id(self.client_id)
        self.path: str = scope["path"]
        self.tenant = tenant_of(scope)
        self.lease = Lease(self.tenant)
        self.socket: SocketSession | None = scope.get("socket")
        self._memory: AnswerMemory = scope["app"].state.answer_memory
        self._num_kept = 0  # bytes
        self.headers = Headers(scope=scope)
        self.given_id: str = scope["request_id"]
        self._came = time.time()
        self._decoded: float | None = None
        self.created = int(self._came)
        self.num_prompt = self.num_cached = self.num_output = 0
        self.retained: Sequence[RetainedPrefix] = ()
        self.reasons: list[str] = []
        self.prompt: str | list[int] = ""
        self.user: str | None = None
        self._stopped: asyncio.Future[APIError] = asyncio.get_running_loop().create_future()
        self._timed: int | None = None  # the first prompt that was answered
        self._times: RequestMetrics | None = None  # of that one
        self._answered: set[int] = set()
        # By prompt: the number of drafts that were verified, and of those that were right.
        self._drafts: dict[int, tuple[int, int]] = {}

    def use_name(self, name: str) -> None:
        """Make the client's name of the request a part of its id."""
        self.id = self._id(name)

    def _id(self, name: str) -> str:
        """Return a unique id with the client's name in it, which need not be unique; "": without one."""
        plain = NOT_IN_IDS.sub("_", name)[:MAX_NAME]
        return f"{self._prefix}{plain}-{self._random}" if plain else self._prefix + self._random

    def count(self, index: int, output: RequestOutput) -> bool:
        """Add an output of prompt `index` to the counts; return True if it is the first one of that prompt.

        output: an increment (DELTA), or the whole output (FINAL_ONLY).

        Raises:
            APIError: the request was aborted.
        """
        first = index not in self._answered
        if first:
            self._answered.add(index)
            self.num_prompt += len(output.prompt_token_ids or ())
            self.num_cached += output.num_cached_tokens or 0
            if self._timed is None:
                self._timed = index
        if index == self._timed:
            self._times = output.metrics
        if output.retained is not self.retained:
            self.retained = output.retained
            warn_of_refusals(output.retained)
        if output.metrics is not None and output.metrics.num_draft_tokens:
            self._drafts[index] = (output.metrics.num_draft_tokens, output.metrics.num_accepted_tokens)
        for completion in output.outputs:
            self.num_output += len(completion.token_ids)
            if completion.finish_reason is not None:
                self.reasons.append(completion.finish_reason)
        check_aborted(output)
        return first

    async def keep(self, num_bytes: int) -> None:
        """Take memory for the results of the answer until `end`; wait while other answers have too much.

        Raises:
            EngineBusyError: too many answers are waiting.
        """
        if (counted := num_bytes - SMALL_POOLED_BYTES) > 0:
            await self._memory.take(counted, self.tenant.name)
            self._num_kept += counted

    def end(self) -> None:
        """Give back what the request has in flight, and the memory of its answer."""
        self.lease.end()
        self._memory.give_back(self._num_kept, self.tenant.name)
        self._num_kept = 0

    def body_decoded(self) -> None:
        """Note that the whole body has been read and decoded."""
        self._decoded = time.time()

    def server_timing(self) -> str:
        """Value of the header Server-Timing (W3C): where the time until now went, in milliseconds by stage.

        body: reading and decoding it. prepare: templates, tokenizing, checks. submit: its way to the core, which
        counts as decode if the core is on another machine. queue: until its first step. prefill: until its first
        token. decode: until the last token that is sent now arrived here. deliver: since then, or since the last
        stage known. With several prompts, submit to decode are those of the first answer.
        """
        ends = [("body", self._decoded)]
        if (times := self._times) is not None:
            ends.append(("prepare", times.arrival_time))
            ends.append(("submit", times.received_time))
            ends.append(("queue", times.first_scheduled_time))
            ends.append(("prefill", times.first_token_time))
            ends.append(("decode", times.last_token_time))
        ends.append(("deliver", time.time()))
        begin, stages = self._came, []
        for name, end in ends:
            if end is not None:
                end = max(begin, end)
                stages.append(f"{name};dur={1e3 * (end - begin):.1f}")
                begin = end
        return ", ".join(stages)

    def durations(self) -> tuple[float, float, float]:
        """Return the seconds since the request came, those of its prefill, and those of its decoding until now.

        The latter two are 0 until they are known; with several prompts, they are those of the first answer.
        """
        prefill = decode = 0.0
        if (times := self._times) is not None and times.first_token_time is not None:
            prefill = times.first_token_time - (times.first_scheduled_time or times.arrival_time)
            decode = (times.last_token_time or times.first_token_time) - times.first_token_time
        return time.time() - self._came, max(0.0, prefill), max(0.0, decode)

    async def run(self, work: Coroutine[Any, Any, None], receive: Receive, seconds: float | None) -> None:
        """Run `work` to its end. Before this raises, `work` has been cancelled and has cleaned up.

        Raises:
            APIError: the client disconnected, `seconds` have passed, or `stop` was called.
            Exceptions of `work`.
        """
        task = asyncio.ensure_future(work)
        left = asyncio.ensure_future(disconnection(receive))
        try:
            await asyncio.wait((task, left, self._stopped), timeout=seconds, return_when=FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            left.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
        if self._stopped.done():
            raise self._stopped.result()
        if left.done() and not left.cancelled():
            raise ClientLeftError
        message = f"the request took longer than {seconds:g} s"
        raise APIError(408, message, code="deadline_passed", headers=NO_RETRY)

    def stop(self, error: APIError) -> None:
        """End the request with an error; has no effect after its end."""
        if not self._stopped.done():
            self._stopped.set_result(error)

    def usage(self) -> Usage:
        """Return the token counts so far.

        No tokens count as cached or as proposed if they could be those of other tenants.
        """
        total, num_cached = (
            self.num_prompt + self.num_output,
            self.num_cached if self.tenant.shows_cached else 0,
        )
        details = PromptTokensDetails(num_cached)
        if self.retained:
            details.retained_tokens = max(each.num_tokens for each in self.retained)
        usage = Usage(self.num_prompt, self.num_output, total, details)
        if self._drafts and self.tenant.shows_cached:
            num_drafts, num_accepted = (sum(numbers) for numbers in zip(*self._drafts.values(), strict=True))
            usage.completion_tokens_details = CompletionTokensDetails(num_accepted, num_drafts - num_accepted)
        return usage

    def log(self, status: int, why: str | None, max_log_len: int) -> None:
        """Log one line. why: the error's message. max_log_len: how much of the prompt to log; -1: all."""
        first = None if self._times is None else self._times.first_token_time
        facts = {
            "id": self.id,
            "request_id": self.given_id,
            "key": self.tenant.name or None,
            "user": self.user and shortened(self.user, MAX_QUOTED),
            "path": shortened(self.path, MAX_QUOTED),
            "status": status,
            "tokens_in": self.num_prompt,
            "tokens_cached": self.num_cached,
            "tokens_out": self.num_output,
            "ttft_ms": None if first is None else round(1e3 * (first - self._came), 1),
            "seconds": round(time.time() - self._came, 3),
            "finish": shortened(",".join(self.reasons), MAX_QUOTED) or None,
            "error": why,
            "prompt": self.prompt[: None if max_log_len < 0 else max_log_len] or None,
        }
        given = {name: value for name, value in facts.items() if value is not None}
        line = " ".join(f"{name}={msgspec.json.encode(value).decode()}" for name, value in given.items())
        logger.info("%s", line, extra={"facts": given})


def check_aborted(output: RequestOutput) -> None:
    """Check that the request was not aborted by /pause or on the engine core.

    Raises:
        APIError: it was.
    """
    if any(completion.finish_reason == "abort" for completion in output.outputs):
        raise APIError(499, "the request was aborted", code="aborted")


async def while_connected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Return the result of `work`; if the client leaves before, it is cancelled and has cleaned up.

    Raises:
        ClientLeftError: the client has left. Exceptions of `work`.
    """
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(disconnection(receive))
    try:
        await asyncio.wait((task, left), return_when=FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeftError
    finally:
        left.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def disconnection(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
