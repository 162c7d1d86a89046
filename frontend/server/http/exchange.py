"""A request for generation while it is served: what is known of it, how it is ended, and its line in the log."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from asyncio import FIRST_COMPLETED
from collections.abc import Coroutine
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from pagewire.frontend.outputs import RequestOutput
from pagewire.frontend.server.http.body import ClientLeftError
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.openai.protocol import PromptTokensDetails, Usage

logger = logging.getLogger("pagewire.server")


class Exchange:
    """What is known of a request while it is served, and afterwards in the log.

    Attributes:
        id: unique, and the engine's name for the request. given_id: what it is called in headers.
        headers: of the request. created: seconds since the epoch, when it came.
        num_prompt, num_cached, num_output: tokens. reasons: finish reasons, in order. prompt: for the log.
    """

    def __init__(self, prefix: str, scope: Scope) -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.path: str = scope["path"]
        self.headers = Headers(scope=scope)
        self.given_id: str = scope["request_id"]
        self._came = time.time()
        self.created = int(self._came)
        self.num_prompt = self.num_cached = self.num_output = 0
        self.reasons: list[str] = []
        self.prompt: str | list[int] = ""
        self._stopped: asyncio.Future[APIError] = asyncio.get_running_loop().create_future()
        self._first_token: float | None = None
        self._answered: set[int] = set()

    def count(self, index: int, output: RequestOutput) -> bool:
        """Take note of an output of prompt `index` that is new (DELTA), or whole (FINAL_ONLY); true if it is the
        first one of that prompt.

        Raises:
            APIError: somebody else has ended the request.
        """
        first = index not in self._answered
        if first:
            self._answered.add(index)
            self.num_prompt += len(output.prompt_token_ids or ())
            self.num_cached += output.num_cached_tokens or 0
            if self._first_token is None and output.metrics is not None:
                self._first_token = output.metrics.first_token_time
        for completion in output.outputs:
            self.num_output += len(completion.token_ids)
            if completion.finish_reason is not None:
                self.reasons.append(completion.finish_reason)
        check_aborted(output)
        return first

    async def run(self, work: Coroutine[Any, Any, None], receive: Receive, seconds: float | None) -> None:
        """Run `work` to its end; otherwise it is cancelled, and has cleaned up, before this raises.

        Raises:
            APIError: the client hung up, it took longer than `seconds`, or was stopped.
            And what `work` raises.
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
        raise APIError(408, f"the request took longer than {seconds:g} s", code="deadline_passed")

    def stop(self, error: APIError) -> None:
        """End it with an error. May be called when it has ended."""
        if not self._stopped.done():
            self._stopped.set_result(error)

    def usage(self) -> Usage:
        """Token counts as of now."""
        total = self.num_prompt + self.num_output
        return Usage(self.num_prompt, self.num_output, total, PromptTokensDetails(self.num_cached))

    def log(self, status: int, why: str | None, max_log_len: int) -> None:
        """Its one line. why: what went wrong. max_log_len: so much of the prompt; -1: all."""
        first = self._first_token
        facts = {
            "id": self.id,
            "request_id": self.given_id,
            "path": self.path,
            "status": status,
            "tokens_in": self.num_prompt,
            "tokens_cached": self.num_cached,
            "tokens_out": self.num_output,
            "ttft_ms": None if first is None else round(1e3 * (first - self._came), 1),
            "seconds": round(time.time() - self._came, 3),
            "finish": ",".join(self.reasons) or None,
            "error": why,
            "prompt": self.prompt[: None if max_log_len < 0 else max_log_len] or None,
        }
        told = {name: value for name, value in facts.items() if value is not None}
        line = " ".join(f"{name}={msgspec.json.encode(value).decode()}" for name, value in told.items())
        logger.info("%s", line, extra={"facts": told})


def check_aborted(output: RequestOutput) -> None:
    """Somebody else than the client may have ended the request: by /pause, or on the engine core.

    Raises:
        APIError: so it is.
    """
    if any(completion.finish_reason == "abort" for completion in output.outputs):
        raise APIError(499, "the request was aborted", code="aborted")


async def disconnection(receive: Receive) -> None:
    """Wait until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
