"""Subtitles, languages, and the special tokens that a generation config and a tokenizer name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import tokenizers
from tokenizers import AddedToken, models

from pagewire.frontend.speech.languages import LANGUAGES, language_code
from pagewire.frontend.speech.segments import TranscriptionSegment, compression_ratio, divide
from pagewire.frontend.speech.subtitles import srt, vtt
from pagewire.frontend.speech.transcriber import TranscriptionParams, checked_language
from pagewire.frontend.speech.vocabulary import SpeechVocabulary
from pagewire.frontend.text.tokenizer import FastTokenizer
from pagewire.ipc.timestamps import TimestampRules
from pagewire.ipc.wire.sources import SourceInfo, Spectrum
from tests.frontend.conftest import FakeCore


def segment(start: float, end: float, text: str) -> TranscriptionSegment:
    return TranscriptionSegment(0, 0, start, end, text, [], 0.0, 0.0, 1.0, 0.0)


SEGMENTS = [segment(0.0, 2.5, " Hello,\n world."), segment(3599.9996, 3661.05, " It is --> there.")]


def test_srt() -> None:
    assert srt(SEGMENTS) == (
        "1\n00:00:00,000 --> 00:00:02,500\nHello, world.\n\n"
        "2\n01:00:00,000 --> 01:01:01,050\nIt is -> there.\n\n"
    )
    assert srt([]) == ""


def test_vtt() -> None:
    assert vtt(SEGMENTS) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nHello, world.\n\n"
        "01:00:00.000 --> 01:01:01.050\nIt is -> there.\n\n"
    )


def test_segments_between_timestamps() -> None:
    """The example of the module: the third sentence is cut off, and heard again."""
    first = 100
    tokens = [100, 1, 220, 220, 2, 3, 350, 350, 4]
    pieces, advance = divide(tokens, first, 3000)
    assert [tuple(piece) for piece in pieces] == [([100, 1, 220], 0, 120), ([220, 2, 3, 350], 120, 250)]
    assert advance == 500
    pieces, advance = divide([100, 1, 220], first, 2000)
    assert ([tuple(piece) for piece in pieces], advance) == ([([100, 1, 220], 0, 120)], 2000)


def test_repetition_compresses() -> None:
    assert compression_ratio("again and " * 30) > 2.4 > compression_ratio("It repeats nothing.")


def test_languages_by_code_and_name() -> None:
    assert language_code("de") == language_code("German") == "de"
    assert language_code("Castilian") == language_code("spanish ") == "es"
    assert len(LANGUAGES) == 100
    with pytest.raises(ValueError, match=r"^language: unknown language 'germn'.*german"):
        language_code("germn")


def tokenizer(*names: str) -> FastTokenizer:
    made = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    made.add_special_tokens([AddedToken(name, special=True) for name in names])
    return FastTokenizer(made)


NAMES = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>")
LATER = ("<|startofprev|>", "<|nocaptions|>", "<|notimestamps|>")


def hearing(core: FakeCore, **config: Any) -> Any:
    source = SourceInfo("audio", 1500, 448, [2], 16_000, 480_000, Spectrum(80, 400, 160))
    return msgspec.structs.replace(core.info, source=source, eos_token_id=1, generation_config=config)


def test_a_vocabulary_of_a_tokenizer(core: FakeCore) -> None:
    info = hearing(core, lang_to_id={"<|en|>": 3, "<|de|>": 4, "<|xx|>": 5}, suppress_tokens=[0])
    assert SpeechVocabulary.of(info, tokenizer(*NAMES, *LATER)) == SpeechVocabulary(
        start=2,
        previous=7,
        no_speech=8,
        tasks={"transcribe": 6, "translate": 5},
        languages={"en": 3, "de": 4},
        rules=TimestampRules(10, 1),
        banned=[0, *range(2, 10)],
    )


def test_languages_of_a_checkpoint_whose_config_names_none(core: FakeCore) -> None:
    """Those that the tokenizer has, where the vocabulary is that of a multilingual model."""
    words = tokenizer(*NAMES, *LATER)
    info = hearing(core)
    assert SpeechVocabulary.of(info, words).languages == {}
    large = msgspec.structs.replace(info, vocab_size=51865)
    assert SpeechVocabulary.of(large, words).languages == {"en": 3, "de": 4}
    assert SpeechVocabulary.of(hearing(core, is_multilingual=True), words).languages == {"en": 3, "de": 4}


def test_a_vocabulary_of_english_only(core: FakeCore) -> None:
    info = hearing(core, is_multilingual=False, lang_to_id={"<|en|>": 3}, no_timestamps_token_id=20)
    vocabulary = SpeechVocabulary.of(info, tokenizer(*NAMES))
    assert (vocabulary.languages, vocabulary.previous, vocabulary.no_speech) == ({}, None, None)
    assert vocabulary.rules == TimestampRules(21, 1)
    assert checked_language(vocabulary, TranscriptionParams(language="english")) == "en"
    for params in (TranscriptionParams(language="de"), TranscriptionParams(task="translate")):
        with pytest.raises(ValueError, match="knows English only"):
            checked_language(vocabulary, params)


def test_models_that_do_not_hear(core: FakeCore) -> None:
    with pytest.raises(ValueError, match="does not transcribe: it is no model of speech"):
        SpeechVocabulary.of(core.info, tokenizer())
    with pytest.raises(ValueError, match="need a tokenizer"):
        SpeechVocabulary.of(hearing(core), None)
    with pytest.raises(ValueError, match="has no timestamps"):
        SpeechVocabulary.of(hearing(core), tokenizer(*NAMES))
