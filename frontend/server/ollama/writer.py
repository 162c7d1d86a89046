"""Conversion of replies to the answers of Ollama's API: whole, or as lines of JSON. No IO."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from pagewire.frontend.client import CompletionOutput
from pagewire.frontend.server.http import sse
from pagewire.frontend.server.http.timestamps import timestamp
from pagewire.frontend.server.ollama.protocol import (
    OllamaAnswer,
    OllamaCall,
    OllamaChatAnswer,
    OllamaFunction,
    OllamaGenerateAnswer,
    OllamaMessage,
)
from pagewire.frontend.server.openai.logprobs import TokenNames, chat_logprobs
from pagewire.frontend.server.openai.prepared_chat import PreparedChat
from pagewire.frontend.server.openai.protocol import TokenLogprob, ToolCall
from pagewire.frontend.server.openai.reply import ReplyDelta, call_arguments
from pagewire.frontend.server.serving.exchange import Exchange

NANOSECONDS = 1e9


class CallCollector:
    """Makes whole calls of increments: a call is whole when the next one begins, or the reply ends."""

    def __init__(self) -> None:
        self._number = -1  # of the open call
        self._head = ("", "")  # its id and its function's name
        self._arguments: list[str] = []

    def add(self, deltas: Sequence[ToolCall], ended: bool) -> list[OllamaCall]:
        """Add increments; return the calls that are whole now. ended: the reply ends with them."""
        whole = []
        for delta in deltas:
            function = delta.function
            if isinstance(delta.id, str):
                whole += self._close()
                self._head = delta.id, str(function.name)
                self._number += 1
            if isinstance(function.arguments, str):
                self._arguments.append(function.arguments)
        return whole + self._close() if ended else whole

    def _close(self) -> list[OllamaCall]:
        (call_id, name), arguments = self._head, "".join(self._arguments)
        self._head, self._arguments = ("", ""), []
        if not call_id:
            return []
        return [OllamaCall(call_id, OllamaFunction(name, call_arguments(arguments), self._number))]


class OllamaWriter:
    """Writes the answers to one request, an increment or a whole. generates: for /api/generate, not /api/chat."""

    def __init__(self, chat: PreparedChat, generates: bool) -> None:
        self._chat, self._generates = chat, generates
        self._model = chat.service.model(chat.request.model)
        self._calls = CallCollector()
        tokenizer = chat.service.optional_tokenizer(chat.request.model)
        self._names = TokenNames(tokenizer, chat.service.options.return_tokens_as_token_ids)

    def line(self, reply: ReplyDelta, part: CompletionOutput) -> bytes:
        """Return an increment as a line; empty if nothing has grown."""
        ended = part.finished()
        calls = self._calls.add(reply.tool_calls, ended)
        if not (ended or reply.content or reply.reasoning or calls or self._chat.request.logprobs):
            return b""
        return sse.ENCODER.encode(self._answer(reply, calls, part)) + b"\n"

    def whole(self, reply: ReplyDelta, part: CompletionOutput) -> bytes:
        """Return a whole reply as JSON."""
        return sse.ENCODER.encode(self._answer(reply, self._calls.add(reply.tool_calls, True), part))

    def _answer(self, reply: ReplyDelta, calls: list[OllamaCall], part: CompletionOutput) -> OllamaAnswer:
        thought = reply.reasoning or UNSET
        fields: dict[str, Any] = {"model": self._model, "created_at": timestamp(time.time())}
        fields |= {"done": part.finished(), "logprobs": self._logprobs(part)}
        if part.finished():
            fields |= {"done_reason": part.finish_reason} | count_usage(self._chat.exchange)
        if self._generates:
            return OllamaGenerateAnswer(**fields, response=reply.content, thinking=thought)
        message = OllamaMessage("assistant", reply.content, thought, calls or UNSET)
        return OllamaChatAnswer(**fields, message=message)

    def _logprobs(self, part: CompletionOutput) -> list[TokenLogprob] | UnsetType:
        request = self._chat.request
        if not request.logprobs:
            return UNSET
        top = request.top_logprobs or 0
        return chat_logprobs(self._names, part.token_ids, part.logprobs or (), top).content or []


def write_loaded(model: str, generates: bool, reason: str = "load") -> bytes:
    """Return the answer to a request without a prompt: the model is loaded, or (reason "unload") it is not."""
    fields: dict[str, Any] = {"model": model, "created_at": timestamp(time.time())}
    fields |= {"done": True, "done_reason": reason}
    if generates:
        return sse.ENCODER.encode(OllamaGenerateAnswer(**fields, response=""))
    return sse.ENCODER.encode(OllamaChatAnswer(**fields, message=OllamaMessage("assistant", "")))


def count_usage(exchange: Exchange) -> dict[str, int]:
    """Return the token counts and the durations of an answer, in nanoseconds."""
    total, prefill, decode = (int(seconds * NANOSECONDS) for seconds in exchange.durations())
    return {
        "total_duration": total,
        "load_duration": 0,  # the model was loaded before the request came
        "prompt_eval_count": exchange.num_prompt,
        "prompt_eval_duration": prefill,
        "eval_count": exchange.num_output,
        "eval_duration": decode,
    }
