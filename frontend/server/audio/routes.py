"""The endpoints /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from typing import Any

from pagewire.frontend.client import (
    CompletionOutput,
    DurationUsage,
    Recording,
    Transcriber,
    Transcription,
    TranscriptionParams,
    VerboseTranscription,
)
from pagewire.frontend.server.audio.memory import RecordingMemory
from pagewire.frontend.server.audio.protocol import (
    NO_WORDS,
    REFUSED,
    TranscriptionRequest,
    TranscriptTextDelta,
    TranscriptTextDone,
)
from pagewire.frontend.server.http import sse
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.form import MEDIA_TYPE, FormDecoder
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.openai.sampling import salt_prompt
from pagewire.frontend.server.serving.exchange import Exchange
from pagewire.frontend.server.serving.generation_endpoint import Events, GenerationEndpoint
from pagewire.frontend.server.serving.service import Service, Services
from pagewire.ipc.wire.params import SamplingParams


def routes(services: Services) -> list[Operation]:
    """Return the routes of the endpoints."""
    kinds = (
        ("transcriptions", "transcribe", "Transcribe a recording."),
        ("translations", "translate", "Translate a recording into English."),
    )
    memory = RecordingMemory(services.options)
    decoder = FormDecoder(TranscriptionRequest, REFUSED, memory.uploads)
    return [
        Operation(
            "POST",
            f"/v1/audio/{path}",
            GenerationEndpoint(services, f"{task}-", decoder, partial(answer_audio, task, memory)),
            text,
            body=TranscriptionRequest,
            body_media=MEDIA_TYPE,
            result=Transcription,
            others=(VerboseTranscription,),
            streams=TranscriptTextDelta | TranscriptTextDone,
            media="text/plain",
        )
        for path, task, text in kinds
    ]


async def answer_audio(
    task: str,
    memory: RecordingMemory,
    service: Service,
    request: TranscriptionRequest,
    exchange: Exchange,
) -> bytes | str | Events:
    """The transcription of a request's recording: JSON, plain text, or events.

    Raises:
        APIError, ValueError: the request is invalid, or the model does not hear. Exceptions of the engine.
    """
    service.model(request.model)
    check_form(request)
    tokenizer = service.optional_tokenizer(request.model)
    requests = RecordingRequests(service, request, exchange)
    transcriber = Transcriber.of(service.info, tokenizer, read_transcription_params(task, request), requests)
    source = service.info.source
    assert source is not None, "the model hears"
    decoded = memory.decoded(request, source)
    if request.stream:
        return events(transcriber, decoded)
    async with decoded as recording:
        return (await transcriber.transcribe(recording)).encode(request.response_format)


def check_form(request: TranscriptionRequest) -> None:
    """Check what the types of fields cannot say.

    Raises:
        APIError: fields contradict each other, or ask for what is not served.
    """
    param = "timestamp_granularities[]"
    if "word" in request.timestamp_granularities:
        raise APIError(400, NO_WORDS, param=param)
    if request.timestamp_granularities and request.response_format != "verbose_json":
        raise APIError(400, f"{param} needs response_format=verbose_json", param=param)
    if request.stream and request.response_format not in ("json", "text"):
        message = (
            f"response_format={request.response_format} has no events: leave stream out, or ask for json"
        )
        raise APIError(400, message, param="stream")


def read_transcription_params(task: str, request: TranscriptionRequest) -> TranscriptionParams:
    """The transcription that a request asks for."""
    return TranscriptionParams(
        task=task,
        language=request.language or None,
        prompt=request.prompt or "",
        **({"temperatures": (request.temperature,)} if request.temperature else {}),
        compression_ratio_threshold=request.compression_ratio_threshold,
        logprob_threshold=request.logprob_threshold,
        no_speech_threshold=request.no_speech_threshold,
        condition_on_previous_text=request.condition_on_previous_text,
    )


async def events(transcriber: Transcriber, decoded: AbstractAsyncContextManager[Recording]) -> Events:
    """Yield the text of a recording, each segment once it is final; then the whole text."""
    text = ""
    async with decoded as recording, aclosing(transcriber.segments(recording)) as windows:
        async for segments in windows:
            for segment in segments:
                delta = segment.text if text else segment.text.lstrip()
                text += delta
                yield sse.event(TranscriptTextDelta(delta))
        yield sse.event(TranscriptTextDone(text.rstrip(), DurationUsage(recording.seconds)))


class RecordingRequests:
    """Submits the requests of one transcription to the engine, one after the other."""

    def __init__(self, service: Service, request: TranscriptionRequest, exchange: Exchange) -> None:
        self._service, self._request, self._exchange = service, request, exchange
        self._number = 0

    async def __call__(self, prompt: Any, params: SamplingParams) -> CompletionOutput:
        """The output of a prompt. Raises exceptions of the engine, and APIError if the request was aborted."""
        exchange, number = self._exchange, self._number
        self._number += 1
        stream = self._service.engine.generate_all(
            [salt_prompt(prompt, self._request.cache_salt)],
            params,
            f"{exchange.id}-{number}",
            priority=self._request.priority or 0,
            trace_headers=exchange.headers,
            admit=exchange.lease.admit,
        )
        async with aclosing(stream):
            async for outputs in stream:
                for _, output in outputs:
                    exchange.count(number, output)
        return output.outputs[0]
