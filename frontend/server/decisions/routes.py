"""The endpoint /v1/systemone: typed questions about a state, answered by probabilities in place of text."""

from __future__ import annotations

from contextlib import aclosing
from functools import partial
from typing import Any, Literal

import msgspec

from pagewire.frontend.client import (
    Answer,
    AskedQuestion,
    Diagnostics,
    PreparedQuestion,
    Questions,
    RequestOutput,
    TokensPrompt,
    check_generates,
    decision_variables,
    decisions_of,
    off_loop,
    reads_of,
    tokenize_off_loop,
)
from pagewire.frontend.server.http import sse
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.openai.prepared_chat import prompt_of
from pagewire.frontend.server.openai.protocol import ChatRequest
from pagewire.frontend.server.openai.sampling import salt_prompt
from pagewire.frontend.server.parsing.choice import ToolUse
from pagewire.frontend.server.parsing.reasoning import begins_within
from pagewire.frontend.server.serving.exchange import Exchange
from pagewire.frontend.server.serving.generation_endpoint import GenerationEndpoint
from pagewire.frontend.server.serving.service import Service, Services
from pagewire.ipc.errors import FieldValueError
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.params import Name, Priority

PATH = "/v1/systemone"


class DecisionRequest(msgspec.Struct, kw_only=True):
    """POST /v1/systemone.

    state: what the questions are about: a text, or JSON. questions: by ids of the client's.
    instructions: about all questions; they come behind the state.
    chat_template_kwargs: variables of the chat template; `enable_thinking`, if it reads that, is false by default.
    timeout, request_id, priority, cache_salt, user: as for completions.
    """

    model: Name | None = None
    state: Any
    questions: Questions
    instructions: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    timeout: float | None = None
    request_id: Name | None = None
    priority: Priority | None = None
    cache_salt: Name | None = None
    user: Name | None = None


class DecisionUsage(msgspec.Struct):
    """Token counts: the prompts of all questions, and one token for each."""

    input_tokens: int
    output_tokens: int


class DecisionResponse(msgspec.Struct, kw_only=True):
    """The answers by the ids of their questions, and how far the model kept to the labels."""

    id: str
    object: Literal["structured_decision"] = "structured_decision"
    created: int
    model: str
    answers: dict[str, Answer]
    usage: DecisionUsage
    diagnostics: dict[str, Diagnostics]


def routes(services: Services) -> list[Operation]:
    """Return the route of the endpoint."""
    return [
        Operation(
            "POST",
            PATH,
            GenerationEndpoint(services, "decision-", DecisionRequest, decide),
            "Answer questions about a state with the probability of each answer.",
            body=DecisionRequest,
            result=DecisionResponse,
        )
    ]


async def decide(service: Service, request: DecisionRequest, exchange: Exchange) -> bytes:
    """Answer a request's questions.

    Raises:
        APIError, ValueError, TypeError: the request is invalid, or this model cannot answer it.
        Exceptions of the engine.
    """
    model = service.model(request.model)
    check_generates(service.info)
    prepared = [await prepared_question(service, request, name) for name in request.questions]
    exchange.prompt = prepared[0].prompt["prompt"]
    outputs = await run_reads(service, request, exchange, prepared)
    decisions = dict(zip(request.questions, decisions_of(prepared, outputs), strict=True))
    response = DecisionResponse(
        id=exchange.id,
        created=exchange.created,
        model=model,
        answers={name: decision.answer for name, decision in decisions.items()},
        usage=DecisionUsage(exchange.num_prompt, exchange.num_output),
        diagnostics={name: decision.diagnostics for name, decision in decisions.items()},
    )
    return await off_loop(len(prepared), sse.ENCODER.encode, response)


async def prepared_question(service: Service, request: DecisionRequest, name: str) -> PreparedQuestion:
    """Render a question, and find the tokens of its labels.

    Raises:
        APIError: the model would reason before it answers. ValueError: a label is not one token.
    """
    tokenizer = service.tokenizer_of(request.model)
    question = AskedQuestion(request.questions[name], tokenizer)
    text = question.message(request.state, request.instructions)
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    chat = ChatRequest(
        model=request.model,
        messages=messages,
        chat_template_kwargs=decision_variables(
            tokenizer, service.options.chat_template, request.chat_template_kwargs
        ),
        cache_salt=request.cache_salt,
    )
    prompt: TokensPrompt = await prompt_of(service, chat, ToolUse())
    marks = service.formats.marks
    if marks is not None and begins_within(marks, prompt["prompt"], None):
        message = (
            "the chat template begins the reply with reasoning, so no answer stands there: turn it off by "
            'chat_template_kwargs, such as {"enable_thinking": false}'
        )
        raise APIError(400, message, param="chat_template_kwargs")
    find = partial(question.prepare, prompt, request.cache_salt)
    try:
        return await tokenize_off_loop(len(text), find)
    except ValueError as error:
        raise FieldValueError("questions", f": {quoted(name)}: {error}") from None


async def run_reads(
    service: Service, request: DecisionRequest, exchange: Exchange, prepared: list[PreparedQuestion]
) -> list[RequestOutput]:
    """The outputs of all reads, which run together. Only the first of a question's counts in the usage."""
    prompts, params = reads_of(prepared)
    stream = service.engine.generate_all(
        [salt_prompt(prompt, request.cache_salt) for prompt in prompts],
        params,
        exchange.id,
        priority=request.priority or 0,
        trace_headers=exchange.headers,
        admit=exchange.lease.admit,
        lora_request=service.adapter(request.model),
        prompt_adapter_request=service.prompt_adapter(request.model),
    )
    outputs: dict[int, RequestOutput] = {}
    async with aclosing(stream):
        async for batch in stream:
            for index, output in batch:
                outputs[index] = output
                if index % 2 == 0:
                    exchange.count(index, output)
    return [outputs[index] for index in range(len(prompts))]
