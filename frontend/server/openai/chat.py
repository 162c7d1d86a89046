"""The endpoint /v1/chat/completions."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET

from pagewire.frontend.client import CompletionOutput, RequestOutput, check_template, off_loop
from pagewire.frontend.server.http import sse
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.openai.beams import beam_outputs, check_beam_fields
from pagewire.frontend.server.openai.custom_tools import CustomCalls, in_functions, merge_calls
from pagewire.frontend.server.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from pagewire.frontend.server.openai.prepared_chat import Outputs, PreparedChat, prepare_chat
from pagewire.frontend.server.openai.protocol import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatToolCall,
)
from pagewire.frontend.server.openai.reply import ReplyDelta, ReplyParser, feed_parser
from pagewire.frontend.server.openai.sampling import check_stream_options
from pagewire.frontend.server.openai.size import writing_size
from pagewire.frontend.server.serving.exchange import Exchange
from pagewire.frontend.server.serving.generation_endpoint import Events, GenerationEndpoint
from pagewire.frontend.server.serving.retention import keep_prompt
from pagewire.frontend.server.serving.service import Service, Services

SERVICE_TIER = "default"  # the only one that there is


def routes(services: Services) -> list[Operation]:
    """Return the route of the endpoint.

    Raises:
        ValueError: the server's own chat template cannot be used.
    """
    template = services.options.chat_template
    if (
        template is not None
        and isinstance(services, Service)
        and services.engine.session.intake.tokenizer is not None
    ):
        check_template(services.tokenizer, template)
    endpoint = GenerationEndpoint(services, "chatcmpl-", ChatRequest, answer_chat)
    return [
        Operation(
            "POST",
            "/v1/chat/completions",
            endpoint,
            "Generate the next message of a conversation.",
            body=ChatRequest,
            result=ChatCompletion,
            streams=ChatChunk,
        )
    ]


async def answer_chat(service: Service, request: ChatRequest, exchange: Exchange) -> bytes | Events:
    """Run a request, and return the JSON of the response or the events of a stream.

    Raises:
        APIError, ValueError, TypeError: the request is invalid.
        Exceptions of the engine.
    """
    check_beam_fields(request)
    request, custom = in_functions(request)
    chat = await prepare_chat(service, request, exchange)
    writer = ChatWriter(chat, custom)
    if request.use_beam_search:
        (output,) = await beam_outputs(
            service, request, [keep_prompt(chat.prompt, chat.retention)], chat.params, exchange
        )
        return writer.whole(output)
    batches = chat.outputs()
    if request.stream:
        return writer.stream(batches)
    async with aclosing(batches):
        async for ((_, output),) in batches:
            final = output
    return await off_loop(writing_size([final]), writer.whole, final)


class ChatWriter:
    """Converts the engine's outputs to the response to one request. custom: names of its custom tools.

    Raises:
        APIError: from the constructor, for an unknown model or contradictory fields.
    """

    def __init__(self, chat: PreparedChat, custom: frozenset[str]) -> None:
        service, request = chat.service, chat.request
        self.service, self.request, self.exchange, self._chat = service, request, chat.exchange, chat
        self.model = service.model(request.model)
        self.options = check_stream_options(request)
        as_ids = request.return_tokens_as_token_ids
        self._names = TokenNames(
            service.optional_tokenizer(request.model),
            service.options.return_tokens_as_token_ids if as_ids is None else as_ids,
        )
        self._parsers: dict[int, ReplyParser] = {}
        self._calls: dict[int, CustomCalls] = {}
        self._custom = custom
        self._called: set[int] = set()
        self._service_tier = UNSET if request.service_tier is None else SERVICE_TIER
        self._role, self._opening = self._role_and_opening()

    def whole(self, output: RequestOutput) -> bytes:
        """Return the whole response as JSON."""
        self.exchange.count(0, output)
        completion = ChatCompletion(
            id=self.exchange.id,
            created=self.exchange.created,
            model=self.model,
            choices=[self._choice(part) for part in output.best(self.request.n or 1)],
            usage=self.exchange.usage(),
            service_tier=self._service_tier,
            prompt_logprobs=None
            if output.prompt_logprobs is None
            else prompt_logprobs(output.prompt_logprobs),
            prompt_token_ids=output.prompt_token_ids or [] if self.request.return_token_ids else UNSET,
        )
        return sse.ENCODER.encode(completion)

    async def stream(self, batches: Outputs) -> Events:
        """Yield the response as events; all events of an output are one piece. The first event has the role."""
        async with aclosing(batches):
            async for ((_, output),) in batches:
                events = self._begin(output) if self.exchange.count(0, output) else b""
                for part in output.outputs:
                    events += self._event(part)
                if events:
                    yield events
        if self.options.include_usage:
            yield self._chunk([], self.exchange.usage()) + sse.DONE
        else:
            yield sse.DONE

    # -------------------------------------------------------------- parts

    def _role_and_opening(self) -> tuple[str, str]:
        """Return the message's role, and its first text: with `echo`, the last message if it has that role."""
        last = self.request.messages[-1] if self.request.messages else {}
        role = self.service.options.response_role
        if self.request.continue_final_message or self.request.add_generation_prompt is False:
            role = str(last.get("role", role))
        content = last.get("content")
        echoes = self.request.echo and last.get("role") == role and isinstance(content, str)
        return role, str(content) if echoes else ""

    def _read(self, part: CompletionOutput) -> ReplyDelta:
        """Parse the next text of an output."""
        if part.index not in self._parsers:
            self._parsers[part.index] = self._chat.new_parser()
        delta = feed_parser(self._parsers[part.index], part.text, part.finished())
        if delta.tool_calls:
            self._called.add(part.index)
        return delta

    def _calls_in(self, part: CompletionOutput, reply: ReplyDelta) -> list[ChatToolCall]:
        """The tool calls of an increment of an output, or those of a whole one."""
        calls = self._calls.setdefault(part.index, CustomCalls(self._custom))
        return calls.read(reply.tool_calls, part.finished())

    def _whole_calls(self, part: CompletionOutput, reply: ReplyDelta) -> list[ChatToolCall]:
        """The calls of a whole output, which have no `index`."""
        return [
            msgspec.structs.replace(call, index=UNSET) for call in merge_calls(self._calls_in(part, reply))
        ]

    def _finish_reason(self, part: CompletionOutput) -> str | None:
        calls = part.index in self._called and part.finish_reason == "stop"
        return "tool_calls" if calls else part.finish_reason

    def _logprobs(self, part: CompletionOutput) -> ChatLogprobs | None:
        if not self.request.logprobs:
            return None
        return chat_logprobs(self._names, part.token_ids, part.logprobs or (), self.request.top_logprobs or 0)

    def _choice(self, part: CompletionOutput) -> ChatChoice:
        reply = self._read(part)
        content = self._opening + reply.content
        return ChatChoice(
            index=part.index,
            message=ChatMessage(
                role=self._role,
                content=content if content or not reply.tool_calls else None,
                reasoning_content=reply.reasoning or UNSET,
                tool_calls=self._whole_calls(part, reply) or UNSET,
            ),
            logprobs=self._logprobs(part),
            finish_reason=self._finish_reason(part),
            stop_reason=part.stop_reason,
            token_ids=list(part.token_ids) if self.request.return_token_ids else UNSET,
            thinking_finish_reason=part.thinking_finish_reason or UNSET,
        )

    def _begin(self, output: RequestOutput) -> bytes:
        """Return the first events, which have the role of each choice. One has the prompt's log probabilities."""
        content = (
            self._opening if self._chat.tools.schema is None else None
        )  # required calls leave no content
        delta = ChatDelta(role=self._role, content=content)
        choices = [ChatChunkChoice(index=index, delta=delta) for index in range(self.request.n or 1)]
        ids = output.prompt_token_ids or [] if self.request.return_token_ids else UNSET
        first, *others = choices
        positions = UNSET if output.prompt_logprobs is None else prompt_logprobs(output.prompt_logprobs)
        return self._chunk([first], self._usage(), ids, positions) + b"".join(
            self._chunk([choice], self._usage(), ids) for choice in others
        )

    def _event(self, part: CompletionOutput) -> bytes:
        """Return the event for an increment of an output; b"" if the increment is empty."""
        reply = self._read(part)
        wants_all = self.request.logprobs or self.request.return_token_ids
        if reply.empty and part.finish_reason is None and not wants_all:
            return b""
        choice = ChatChunkChoice(
            index=part.index,
            delta=ChatDelta(
                content=reply.content or UNSET,
                reasoning_content=reply.reasoning or UNSET,
                tool_calls=self._calls_in(part, reply) or UNSET,
            ),
            logprobs=self._logprobs(part),
            finish_reason=self._finish_reason(part),
            stop_reason=UNSET if part.finish_reason is None else part.stop_reason,
            token_ids=list(part.token_ids) if self.request.return_token_ids else UNSET,
            thinking_finish_reason=part.thinking_finish_reason or UNSET,
        )
        if not reply.tool_calls or choice.finish_reason is None:
            return self._chunk([choice], self._usage())
        # OpenAI's client takes a call's arguments to be whole when an event behind them brings the reason.
        end = ChatChunkChoice(
            index=part.index,
            delta=ChatDelta(),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        calls = msgspec.structs.replace(choice, finish_reason=None, stop_reason=UNSET)
        return self._chunk([calls], self._usage()) + self._chunk([end], self._usage())

    def _usage(self) -> Any:
        """Return the field `usage` of an event: counts, null (None), or absent (UNSET)."""
        if not self.options.include_usage:
            return UNSET
        return self.exchange.usage() if self.options.continuous_usage_stats else None

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Any,
        prompt_token_ids: Any = UNSET,
        positions: Any = UNSET,
    ) -> bytes:
        return sse.event(
            ChatChunk(
                id=self.exchange.id,
                created=self.exchange.created,
                model=self.model,
                choices=choices,
                service_tier=self._service_tier,
                usage=usage,
                prompt_token_ids=prompt_token_ids,
                prompt_logprobs=positions,
            )
        )
