"""Transcription of a recording, window after window.

recording --window--> tokens, again at a higher temperature while they repeat themselves or are unlikely
          <---seek--- segments; the next window begins with the last timestamp, and gets the text so far
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, NamedTuple

import msgspec

from pagewire.frontend.media.items import Decoded
from pagewire.frontend.requests.outputs import CompletionOutput
from pagewire.frontend.speech.languages import LANGUAGES, language_code
from pagewire.frontend.speech.recording import Recording
from pagewire.frontend.speech.segments import (
    FRAMES_OF_POSITION,
    TranscriptionSegment,
    compression_ratio,
    divide,
)
from pagewire.frontend.speech.transcript import DurationUsage, VerboseTranscription, join_segments
from pagewire.frontend.speech.vocabulary import SpeechVocabulary
from pagewire.frontend.text.tokenizer import Tokenizer
from pagewire.ipc.errors import FieldValueError
from pagewire.ipc.wire.messages import EngineInfo
from pagewire.ipc.wire.params import RequestOutputKind, SamplingParams

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
PROMPT_CHARS = 8192  # of a prompt's end, which have more tokens than a window gets
FORGETFUL = 0.5  # temperature above which a text is too uncertain to be given to the next window

Generate = Callable[[Any, SamplingParams], Awaitable[CompletionOutput]]
"""Generates the output of one prompt."""


class TranscriptionParams(msgspec.Struct, frozen=True):
    """The parameters of a transcription. The thresholds and their defaults are those of openai/whisper.

    task: "transcribe", or "translate" into English. language: a code or a name; None: it is detected.
    prompt: text that stands before the first window, such as names to be spelled so.
    temperatures: of the attempts at a window, until one is good enough.
    compression_ratio_threshold: an attempt over it repeats itself. None: no text does.
    logprob_threshold: an attempt whose tokens have less of a log probability, on average, is not good enough.
    no_speech_threshold: a window that is silence with more of a probability, and unlikely as text, is left out.
    condition_on_previous_text: each window gets the text before it.
    """

    task: str = "transcribe"
    language: str | None = None
    prompt: str = ""
    temperatures: tuple[float, ...] = TEMPERATURES
    compression_ratio_threshold: float | None = 2.4
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    condition_on_previous_text: bool = True


class DecodedWindow(NamedTuple):
    """An attempt at a window. tokens: without the end of text. ratio: of compression."""

    tokens: list[int]
    temperature: float
    avg_logprob: float
    ratio: float
    no_speech_prob: float


class Transcriber:
    """One transcription.

    max_tokens: of a prompt and its output.

    Attributes:
        task: "transcribe" or "translate". language: its code; None until `detect` has returned.

    Raises:
        ValueError: the model does not know the language, or does not translate.
    """

    def __init__(
        self,
        vocabulary: SpeechVocabulary,
        tokenizer: Tokenizer,
        max_tokens: int,
        params: TranscriptionParams,
        generate: Generate,
    ) -> None:
        self._vocabulary, self._tokenizer, self._params = vocabulary, tokenizer, params
        self._generate, self.task = generate, params.task
        self._most = max_tokens // 2  # tokens of a window, and of earlier text with its mark
        self.language = checked_language(vocabulary, params)
        self._history: list[int] = []
        if end := params.prompt.strip()[-PROMPT_CHARS:]:
            given = tokenizer.encode(f" {end}", add_special_tokens=False)
            self._history = [token_id for token_id in given if token_id < vocabulary.rules.end]
        if self._history and vocabulary.previous is None:
            raise FieldValueError("prompt", ": the model has no token for earlier text")

    @classmethod
    def of(
        cls, info: EngineInfo, tokenizer: Tokenizer | None, params: TranscriptionParams, generate: Generate
    ) -> Transcriber:
        """That of an engine.

        Raises:
            ValueError: its model does not hear, or as the class.
        """
        vocabulary = SpeechVocabulary.of(info, tokenizer)
        assert info.source is not None and tokenizer is not None, "there is a vocabulary"
        return cls(vocabulary, tokenizer, info.source.max_target_tokens, params, generate)

    async def transcribe(self, recording: Recording) -> VerboseTranscription:
        """Transcribe a whole recording."""
        segments = [part async for found in self.segments(recording) for part in found]
        language = "en" if self.task == "translate" else await self.detect(recording)
        usage = DurationUsage(recording.seconds)
        return VerboseTranscription(
            self.task, LANGUAGES[language], recording.seconds, join_segments(segments), segments, usage
        )

    async def detect(self, recording: Recording) -> str:
        """The code of the recording's language: the given one, or that of its first window."""
        if self.language is None:
            codes = {token_id: code for code, token_id in self._vocabulary.languages.items()}
            params = SamplingParams(
                temperature=0.0,
                max_tokens=1,
                allowed_token_ids=sorted(codes),
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            output = await self._ask(recording.window(0), [self._vocabulary.start], params)
            self.language = codes[output.token_ids[0]]
        return self.language

    async def segments(self, recording: Recording) -> AsyncGenerator[list[TranscriptionSegment], None]:
        """The segments of a recording, those of one window at a time; windows without speech have none."""
        language = await self.detect(recording)
        seek = number = 0
        while seek < recording.num_frames:
            num_frames = recording.frames_from(seek)
            decoded = await self._decode(recording.window(seek), language)
            if self._is_silence(decoded):
                seek += num_frames
                continue
            pieces, advance = divide(decoded.tokens, self._vocabulary.rules.first, num_frames)
            self._history += [token_id for piece in pieces for token_id in piece.tokens]
            if not self._params.condition_on_previous_text or decoded.temperature > FORGETFUL:
                self._history = []
            spoken = [(piece, text) for piece in pieces if (text := self._text(piece.tokens)).strip()]
            seconds = recording.spectrum.hop / recording.rate  # of a frame
            yield [
                TranscriptionSegment(
                    id=number + i,
                    seek=seek,
                    start=(seek + FRAMES_OF_POSITION * piece.start) * seconds,
                    end=(seek + FRAMES_OF_POSITION * piece.end) * seconds,
                    text=text,
                    tokens=piece.tokens,
                    temperature=decoded.temperature,
                    avg_logprob=decoded.avg_logprob,
                    compression_ratio=decoded.ratio,
                    no_speech_prob=decoded.no_speech_prob,
                )
                for i, (piece, text) in enumerate(spoken)
            ]
            number += len(spoken)
            seek += advance

    async def _decode(self, window: Decoded, language: str) -> DecodedWindow:
        """The first attempt at a window that is good enough, or the last one."""
        prompt = self._prompt(language)
        silence = await self._no_speech_prob(window, prompt)
        for temperature in self._params.temperatures:
            decoded = await self._attempt(window, prompt, temperature, silence)
            if self._is_silence(decoded) or not self._is_poor(decoded):
                break
        return decoded

    async def _attempt(
        self, window: Decoded, prompt: list[int], temperature: float, silence: float
    ) -> DecodedWindow:
        rules = self._vocabulary.rules
        params = SamplingParams(
            temperature=temperature,
            max_tokens=self._most,
            logprobs=0,
            processed_logprobs=True,
            timestamps=rules,
            bad_words_token_ids=[[token_id] for token_id in self._vocabulary.banned],
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._ask(window, prompt, params)
        tokens = [token_id for token_id in output.token_ids if token_id != rules.end]
        average = (output.cumulative_logprob or 0.0) / len(output.token_ids)
        ratio = compression_ratio(self._text(tokens).strip())
        return DecodedWindow(tokens, temperature, average, ratio, silence)

    async def _no_speech_prob(self, window: Decoded, prompt: list[int]) -> float:
        """The probability of the token of silence in the place of the first one after the start."""
        if (token := self._vocabulary.no_speech) is None:
            return 0.0
        begin = prompt[: prompt.index(self._vocabulary.start) + 1]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            allowed_token_ids=[token],
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._ask(window, begin, params)
        return math.exp(output.cumulative_logprob or 0.0)

    async def _ask(self, window: Decoded, prompt: list[int], params: SamplingParams) -> CompletionOutput:
        return await self._generate(
            {"prompt_token_ids": prompt, "multi_modal_data": {window.kind: window}}, params
        )

    def _prompt(self, language: str) -> list[int]:
        """The tokens before an output: the text so far as far as there is room, and what to do."""
        vocabulary = self._vocabulary
        ids = [vocabulary.start]
        if vocabulary.languages:
            ids += [vocabulary.languages[language], vocabulary.tasks[self.task]]
        if self._history and vocabulary.previous is not None:
            ids = [vocabulary.previous, *self._history[-(self._most - 1) :], *ids]
        return ids

    def _text(self, tokens: list[int]) -> str:
        text = [token_id for token_id in tokens if token_id < self._vocabulary.rules.end]
        return self._tokenizer.decode(text)

    def _is_poor(self, decoded: DecodedWindow) -> bool:
        ratio = self._params.compression_ratio_threshold
        return (ratio is not None and decoded.ratio > ratio) or self._is_unlikely(decoded)

    def _is_unlikely(self, decoded: DecodedWindow) -> bool:
        threshold = self._params.logprob_threshold
        return threshold is not None and decoded.avg_logprob < threshold

    def _is_silence(self, decoded: DecodedWindow) -> bool:
        threshold = self._params.no_speech_threshold
        return threshold is not None and decoded.no_speech_prob > threshold and self._is_unlikely(decoded)


def checked_language(vocabulary: SpeechVocabulary, params: TranscriptionParams) -> str | None:
    """The code of the language of a transcription; None: it is to be detected.

    Raises:
        ValueError: the model does not know it, or does not translate.
    """
    code = None if params.language is None else language_code(params.language)
    if not vocabulary.languages:
        if params.task != "transcribe" or code not in (None, "en"):
            raise FieldValueError("language", ": this model knows English only, and does not translate")
        return "en"
    if params.task not in vocabulary.tasks:
        raise ValueError(f"this model has no token for the task {params.task!r}")
    if code is not None and code not in vocabulary.languages:
        raise FieldValueError("language", f": this model does not know {LANGUAGES[code]}")
    return code
