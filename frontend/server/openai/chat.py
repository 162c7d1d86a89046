"""The endpoint /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET

from pagewire.frontend.api.off_loop import off_loop, tokenizing
from pagewire.frontend.requests.inputs import check_generates
from pagewire.frontend.requests.outputs import CompletionOutput, RequestOutput
from pagewire.frontend.server.http import sse
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.http.warnings import warn
from pagewire.frontend.server.openai.beams import beam_outputs, check_beam_fields
from pagewire.frontend.server.openai.constraints import constrained, demands
from pagewire.frontend.server.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from pagewire.frontend.server.openai.protocol import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ToolCall,
)
from pagewire.frontend.server.openai.reply import (
    ReplyDelta,
    ReplyParser,
    ReplyWithCalls,
    TextReply,
    joined,
    read,
)
from pagewire.frontend.server.openai.sampling import (
    best_outputs,
    check_stream_options,
    salted,
    sampling_params,
)
from pagewire.frontend.server.openai.size import (
    check_amount,
    check_conversation,
    logprob_budget,
    writing_size,
)
from pagewire.frontend.server.parsing.choice import ToolUse, tool_use
from pagewire.frontend.server.parsing.history import read_history
from pagewire.frontend.server.parsing.reasoning import parser_for, reasoning_format, thinking
from pagewire.frontend.server.serving.exchange import Exchange
from pagewire.frontend.server.serving.generation_endpoint import Events, GenerationEndpoint
from pagewire.frontend.server.serving.service import Service
from pagewire.frontend.text.chat_template import chat_prompt, check_template, unread_text
from pagewire.frontend.text.conversation import as_text
from pagewire.frontend.text.prompts import TokensPrompt
from pagewire.ipc.wire.params import SamplingParams

SERVICE_TIER = "default"  # the only one that there is

Outputs: TypeAlias = AsyncGenerator[list[tuple[int, RequestOutput]], None]


def routes(service: Service) -> list[Operation]:
    """Return the route of the endpoint.

    Raises:
        ValueError: the server's own chat template cannot be used.
    """
    if service.options.chat_template is not None and service.engine.session.tokenizer is not None:
        check_template(service.tokenizer, service.options.chat_template)
    endpoint = GenerationEndpoint(service, "chatcmpl-", ChatRequest, answer)
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


async def answer(service: Service, request: ChatRequest, exchange: Exchange) -> bytes | Events:
    """Run a request, and return the JSON of the response or the events of a stream.

    Raises:
        APIError, ValueError, TypeError: the request is invalid.
        Exceptions of the engine.
    """
    tools = tools_of(service, request)
    writer = ChatWriter(service, request, exchange, tools)
    check_chat(request)
    check_beam_fields(request)
    check_generates(service.info)
    prompt = await prompt_of(service, request, tools)
    params = params_of(service, request, tools, prompt)
    exchange.prompt = prompt.get("prompt", "")
    if request.use_beam_search:
        (output,) = await beam_outputs(service, request, [prompt], params, exchange)
        return writer.whole(output)
    batches = generate(service, request, exchange, prompt, params)
    if request.stream:
        return writer.stream(batches)
    async with aclosing(batches):
        async for ((_, output),) in batches:
            final = output
    return await off_loop(writing_size([final]), writer.whole, final)


def generate(
    service: Service, request: ChatRequest, exchange: Exchange, prompt: TokensPrompt, params: SamplingParams
) -> Outputs:
    """Submit the request, and return an iterator over batches of its outputs."""
    return service.engine.generate_all(
        [salted(prompt, request.cache_salt)],
        params,
        exchange.id,
        priority=request.priority or 0,
        trace_headers=exchange.headers,
        logprob_budget=logprob_budget(service),
        admit=exchange.lease.admit,
        lora_request=service.adapter(request.model),
        prompt_adapter_request=service.prompt_adapter(request.model),
    )


def check_chat(request: ChatRequest) -> None:
    """Check fields that are not supported, and contradictions.

    Raises:
        APIError: a field is not supported or contradicts another.
    """
    if request.functions or request.function_call:
        raise APIError(400, "functions and function_call are not supported: use tools", param="functions")
    if request.audio or set(request.modalities or ()) - {"text"}:
        raise APIError(400, "only text can be generated", param="modalities")
    if request.web_search_options is not None:
        message = (
            "web_search_options is not supported: nothing is searched; describe a search function in tools"
        )
        raise APIError(400, message, param="web_search_options")
    if request.top_logprobs and not request.logprobs:
        raise APIError(400, "top_logprobs needs logprobs=true", param="top_logprobs")


def tools_of(service: Service, request: ChatRequest) -> ToolUse:
    """Return how the request uses tools, and how its outputs are parsed.

    Raises:
        ValueError: the tools or the choice are malformed or contradictory.
    """
    options = service.options
    tools = tool_use(
        request.tools,
        request.tool_choice,
        parallel=request.parallel_tool_calls is not False,
        parser=options.tool_call_parser,
        auto=options.enable_auto_tool_choice,
        prompt_unused=options.prompt_unused_tools,
    )
    if options.reasoning_parser is None:
        return tools
    if options.enable_in_reasoning and (tools.schema is not None or demands(request)):
        return tools  # the constraint covers the whole output, so there is no reasoning
    return thinking(tools, options.reasoning_parser)


def params_of(service: Service, request: ChatRequest, tools: ToolUse, prompt: TokensPrompt) -> SamplingParams:
    """Return the engine's parameters for a request.

    Raises:
        APIError, ValueError, TypeError: a value is out of range, or fields contradict each other.
    """
    max_tokens = (
        request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    )
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    params = sampling_params(service, request, max_tokens, logprobs)
    check_amount(service, 1, params)
    thought = None
    if tools.reasoning is not None:
        thought = reasoning_format(tools.reasoning, prompt.get("prompt", ""), continued_text(request))
    return constrained(params, request, tools, thought)


async def prompt_of(
    service: Service, request: ChatRequest, tools: ToolUse, counts: bool = False
) -> TokensPrompt:
    """Apply the chat template to the conversation, and return the prompt.

    counts: the prompt's tokens are only counted or listed, so there may be more than the model takes.

    Raises:
        APIError: there is no tokenizer, the conversation is too large, or the request has a template and that is
            not allowed.
        ContextLengthError: the conversation is too long for the model.
        EngineBusyError: too many templates from requests are waiting.
        ValueError, TypeError: there is no template, it rejects the conversation, or messages are malformed.
    """
    if request.chat_template is not None and not service.options.trust_request_chat_template:
        raise APIError(
            400,
            "chat templates in requests are not allowed (--trust-request-chat-template)",
            param="chat_template",
        )
    variables: dict[str, Any] = {}
    if request.documents is not None:
        variables["documents"] = request.documents
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
    if request.verbosity is not None:
        variables["verbosity"] = request.verbosity
    continues = bool(request.continue_final_message)
    generation = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    size = check_conversation(service, request.messages)
    tokenizer = service.tokenizer_of(request.model)

    unread: list[str] = []

    def make() -> TokensPrompt:
        return chat_prompt(
            tokenizer,
            read_history(request.messages),
            chat_template=request.chat_template or service.options.chat_template,
            template_files=request.chat_template is None,
            chat_template_content_format=service.options.chat_template_content_format,
            add_generation_prompt=generation,
            continue_final_message=continues,
            tools=tools.prompted,
            chat_template_kwargs=variables | (request.chat_template_kwargs or {}),
            on_unread=unread.extend,
            add_special_tokens=bool(request.add_special_tokens),
            max_model_len=service.info.max_model_len,
            truncates=counts or request.truncate_prompt_tokens is not None,
        )

    if request.chat_template is not None:
        prompt = await service.request_templates.run(make)
    else:
        prompt = await tokenizing(size, make)
    if unread:
        warn(unread_text(unread))
    return prompt


def reply_parser(request: ChatRequest, tools: ToolUse, prompt: str | None) -> ReplyParser:
    """Return a new parser for one output. prompt: the text to which it is the reply."""
    parser = parser_for(tools, prompt or "", continued_text(request))
    return TextReply() if parser is None else ReplyWithCalls(parser)


def continued_text(request: ChatRequest) -> str | None:
    """Return the text of the final message if the reply continues it; else None."""
    return as_text(request.messages[-1].get("content")) if request.continue_final_message else None


def whole_calls(deltas: list[ToolCall]) -> list[ToolCall]:
    """Combine deltas into whole calls, which have no `index`."""
    return [msgspec.structs.replace(call, index=UNSET) for call in joined(deltas)]


class ChatWriter:
    """Converts the engine's outputs to the response to one request.

    Raises:
        APIError: from the constructor, for an unknown model or contradictory fields.
    """

    def __init__(self, service: Service, request: ChatRequest, exchange: Exchange, tools: ToolUse) -> None:
        self.service, self.request, self.exchange, self.tools = service, request, exchange, tools
        self.model = service.model(request.model)
        self.options = check_stream_options(request)
        as_ids = request.return_tokens_as_token_ids
        self._names = TokenNames(
            service.optional_tokenizer(request.model),
            service.options.return_tokens_as_token_ids if as_ids is None else as_ids,
        )
        self._parsers: dict[int, ReplyParser] = {}
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
            choices=[
                self._choice(part, output.prompt)
                for part in best_outputs(output.outputs, self.request.n or 1)
            ],
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
                    events += self._event(part, output.prompt)
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

    def _read(self, part: CompletionOutput, prompt: str | None) -> ReplyDelta:
        """Parse the next text of an output. prompt: the text to which it is the reply."""
        if part.index not in self._parsers:
            self._parsers[part.index] = reply_parser(self.request, self.tools, prompt)
        delta = read(self._parsers[part.index], part.text, part.finished())
        if delta.tool_calls:
            self._called.add(part.index)
        return delta

    def _finish_reason(self, part: CompletionOutput) -> str | None:
        calls = part.index in self._called and part.finish_reason == "stop"
        return "tool_calls" if calls else part.finish_reason

    def _logprobs(self, part: CompletionOutput) -> ChatLogprobs | None:
        if not self.request.logprobs:
            return None
        return chat_logprobs(self._names, part.token_ids, part.logprobs or (), self.request.top_logprobs or 0)

    def _choice(self, part: CompletionOutput, prompt: str | None) -> ChatChoice:
        reply = self._read(part, prompt)
        content = self._opening + reply.content
        return ChatChoice(
            index=part.index,
            message=ChatMessage(
                role=self._role,
                content=content if content or not reply.tool_calls else None,
                reasoning_content=reply.reasoning or UNSET,
                tool_calls=whole_calls(reply.tool_calls) or UNSET,
            ),
            logprobs=self._logprobs(part),
            finish_reason=self._finish_reason(part),
            stop_reason=part.stop_reason,
            token_ids=list(part.token_ids) if self.request.return_token_ids else UNSET,
        )

    def _begin(self, output: RequestOutput) -> bytes:
        """Return the first events, which have the role of each choice. One has the prompt's log probabilities."""
        content = self._opening if self.tools.schema is None else None  # required calls leave no content
        delta = ChatDelta(role=self._role, content=content)
        choices = [ChatChunkChoice(index=index, delta=delta) for index in range(self.request.n or 1)]
        ids = output.prompt_token_ids or [] if self.request.return_token_ids else UNSET
        first, *others = choices
        positions = UNSET if output.prompt_logprobs is None else prompt_logprobs(output.prompt_logprobs)
        return self._chunk([first], self._usage(), ids, positions) + b"".join(
            self._chunk([choice], self._usage(), ids) for choice in others
        )

    def _event(self, part: CompletionOutput, prompt: str | None) -> bytes:
        """Return the event for an increment of an output; b"" if the increment is empty."""
        reply = self._read(part, prompt)
        wants_all = self.request.logprobs or self.request.return_token_ids
        if reply.empty and part.finish_reason is None and not wants_all:
            return b""
        choice = ChatChunkChoice(
            index=part.index,
            delta=ChatDelta(
                content=reply.content or UNSET,
                reasoning_content=reply.reasoning or UNSET,
                tool_calls=reply.tool_calls or UNSET,
            ),
            logprobs=self._logprobs(part),
            finish_reason=self._finish_reason(part),
            stop_reason=UNSET if part.finish_reason is None else part.stop_reason,
            token_ids=list(part.token_ids) if self.request.return_token_ids else UNSET,
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
