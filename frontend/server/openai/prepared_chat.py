"""A chat request on its way to the engine, for every API that is made of chat completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import msgspec

from pagewire.frontend.client import (
    OFF_LOOP_CHARS,
    CompletionOutput,
    RequestOutput,
    TokensPrompt,
    as_text,
    chat_prompt,
    check_generates,
    has_media,
    media_threads,
    off_loop,
    salt_of,
    tokenize_off_loop,
)
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.warnings import warn_client
from pagewire.frontend.server.openai.constraints import constrain_params, demands
from pagewire.frontend.server.openai.protocol import ChatRequest
from pagewire.frontend.server.openai.reply import (
    ReplyDelta,
    ReplyParser,
    ReplyWithCalls,
    TextReply,
    feed_parser,
)
from pagewire.frontend.server.openai.sampling import check_stream_options, make_sampling_params, salt_prompt
from pagewire.frontend.server.openai.size import (
    VALUE_CHARS,
    check_amount,
    check_conversation,
    check_tools,
    logprob_budget,
    num_json_values,
)
from pagewire.frontend.server.parsing.choice import ToolUse, tool_use
from pagewire.frontend.server.parsing.history import read_history
from pagewire.frontend.server.parsing.reasoning import (
    begins_within,
    parser_for,
    reasoning_format,
    thinking,
)
from pagewire.frontend.server.serving.exchange import Exchange
from pagewire.frontend.server.serving.retention import keep_prompt, wishes_of
from pagewire.frontend.server.serving.service import Service
from pagewire.ipc.wire.items import Retention
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.thinking import ThinkingMarks

Outputs: TypeAlias = AsyncGenerator[list[tuple[int, RequestOutput]], None]
Replies: TypeAlias = AsyncGenerator[tuple[ReplyDelta, CompletionOutput], None]


@dataclass(frozen=True)
class PreparedChat:
    """A chat request that was checked.

    Attributes:
        tools: how it uses tools, and how its outputs are parsed.
        prompt: the rendered conversation. params: the engine's parameters.
        retention: wishes that the prompt stays cached.
    """

    service: Service
    request: ChatRequest
    exchange: Exchange
    tools: ToolUse
    prompt: TokensPrompt
    params: SamplingParams
    retention: list[Retention] = field(default_factory=list)

    def outputs(self) -> Outputs:
        """Submit the request, and return an iterator over batches of its outputs."""
        service, request = self.service, self.request
        return service.engine.generate_all(
            [keep_prompt(salt_prompt(self.prompt, request.cache_salt), self.retention)],
            self.params,
            self.exchange.id,
            priority=request.priority or 0,
            trace_headers=self.exchange.headers,
            logprob_budget=logprob_budget(service),
            admit=self.exchange.lease.admit,
            lora_request=service.adapter(request.model),
            prompt_adapter_request=service.prompt_adapter(request.model),
        )

    async def replies(self) -> Replies:
        """Submit a request for one output, count its tokens, and yield its parts beside what the engine gave.

        A request with `stream` yields increments, another one the whole reply.
        """
        parser = self.new_parser()
        async with aclosing(self.outputs()) as batches:
            async for ((_, output),) in batches:
                self.exchange.count(0, output)
                (part,) = output.outputs
                yield await off_loop(len(part.text), feed_parser, parser, part.text, part.finished()), part

    def new_parser(self) -> ReplyParser:
        """Return a new parser for one output."""
        parser = parser_for(self.tools, self.prompt.get("prompt", ""), continued_text(self.request))
        return TextReply() if parser is None else ReplyWithCalls(parser)


async def prepare_chat(
    service: Service,
    request: ChatRequest,
    exchange: Exchange,
    render: Callable[[Service, ChatRequest, ToolUse], Awaitable[TokensPrompt]] | None = None,
) -> PreparedChat:
    """Check a request, and render its conversation.

    render: returns the prompt; None: `prompt_of`.

    Raises:
        APIError, ValueError, TypeError: the request is invalid.
    """
    service.model(request.model)
    check_chat(request)
    check_generates(service.info)
    retention = wishes_of(request)
    tools = await tools_of(service, request)
    prompt = await (render or prompt_of)(service, request, tools)
    exchange.prompt = prompt.get("prompt", "")
    params = await off_loop(check_tools(tools.prompted), chat_params, service, request, tools, prompt)
    return PreparedChat(service, request, exchange, tools, prompt, params, retention)


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
    check_stream_options(request)


async def tools_of(service: Service, request: ChatRequest, counts: bool = False) -> ToolUse:
    """Return how the request uses tools, and how its outputs are parsed.

    counts: the prompt's tokens are only counted, and the request has no outputs.

    Raises:
        APIError: the tools are too large. ValueError: they or the choice are malformed or contradictory.
    """
    options = service.options
    tools = await off_loop(
        check_tools(request.tools),
        partial(
            tool_use,
            request.tools,
            request.tool_choice,
            parallel=request.parallel_tool_calls is not False,
            parser=service.formats.dialect,
            auto=service.formats.auto,
            prompt_unused=options.prompt_unused_tools,
            counts=counts,
            constrained=options.constrain_auto_tools and not request.use_beam_search,
        ),
    )
    if service.formats.marks is None:
        return tools
    if options.enable_in_reasoning and (tools.schema is not None or demands(request)):
        return tools  # the constraint covers the whole output, so there is no reasoning
    return thinking(tools, service.formats.marks)


def chat_params(
    service: Service, request: ChatRequest, tools: ToolUse, prompt: TokensPrompt
) -> SamplingParams:
    """Return the engine's parameters for a request.

    Raises:
        APIError, ValueError, TypeError: a value is out of range, or fields contradict each other.
    """
    max_tokens = (
        request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    )
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    params = make_sampling_params(service, request, max_tokens, logprobs)
    check_amount(service, 1, params)
    if request.thinking_token_budget is not None:
        params = msgspec.structs.replace(
            params,
            thinking_token_budget=request.thinking_token_budget,
            thinking=marks_of(tools, prompt.get("prompt", ""), continued_text(request)),
        )
    thought = None
    if tools.reasoning is not None:
        thought = reasoning_format(tools.reasoning, prompt.get("prompt", ""), continued_text(request))
    return constrain_params(params, request, tools, thought)


def marks_of(tools: ToolUse, prompt: str, continued: str | None) -> ThinkingMarks:
    """Return the marks of the reasoning in the reply to a prompt.

    Raises:
        APIError: the model's format of reasoning is not known, or the reply has none.
    """
    if tools.reasoning is None:
        message = (
            "thinking_token_budget has no effect: this server knows no format of reasoning for the model, or the "
            "output has none since it follows a schema; --reasoning-parser names a format"
        )
        raise APIError(400, message, param="thinking_token_budget")
    marks = tools.reasoning
    return ThinkingMarks(marks.open, marks.close, begins_within(marks, prompt, continued))


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
        if request.reasoning_effort == "none":
            variables["enable_thinking"] = False
    if request.verbosity is not None:
        variables["verbosity"] = request.verbosity
    continues = bool(request.continue_final_message)
    generation = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    size = check_conversation(service, request.messages) + check_tools(tools.prompted)
    tokenizer = service.tokenizer_of(request.model)

    given = variables | (request.chat_template_kwargs or {})
    size += VALUE_CHARS * num_json_values(given, OFF_LOOP_CHARS // VALUE_CHARS)
    warnings: list[str] = []

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
            prompts_tools=service.formats.prompts_tools,
            chat_template_kwargs=given,
            on_warning=warnings.append,
            add_special_tokens=bool(request.add_special_tokens),
            max_model_len=service.info.max_model_len,
            media=service.info.media,
            mm_processor_kwargs=request.mm_processor_kwargs,
            salt=request.cache_salt or None,
            truncates=counts or request.truncate_prompt_tokens is not None,
        )

    if request.chat_template is not None:
        prompt = await service.request_templates.run(make)
    else:
        prompt = await tokenize_off_loop(size, make)
    for text in warnings:
        warn_client(text)
    return prompt


async def place_media(service: Service, prompt: TokensPrompt) -> list[int]:
    """The tokens of a prompt, with those that stand for its pictures and sounds.

    Raises:
        ValueError: a picture or sound cannot be had.
    """
    token_ids, media = prompt["prompt_token_ids"], service.engine.session.intake.media
    if media is None or not has_media(prompt):
        return token_ids
    placed, _ = await media_threads.run(lambda: media.place(token_ids, prompt, salt_of(prompt)))
    return placed


def continued_text(request: ChatRequest) -> str | None:
    """Return the text of the final message if the reply continues it; else None."""
    return as_text(request.messages[-1].get("content")) if request.continue_final_message else None
