"""The tokens by which Whisper is told what to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pagewire.frontend.speech.languages import LANGUAGES
from pagewire.frontend.text.tokenizer import Tokenizer
from pagewire.ipc.timestamps import TimestampRules
from pagewire.ipc.wire.messages import EngineInfo
from pagewire.ipc.wire.sources import SOUND

TASKS = ("transcribe", "translate")
MULTILINGUAL_SIZE = 51865  # tokens of a vocabulary with languages


@dataclass(frozen=True)
class SpeechVocabulary:
    """The special tokens of a model that hears.

    start, previous, no_speech: before an output, before earlier text, and in place of text; None: it has none.
    tasks, languages: by name and by code; empty for a model of English only.
    rules: of its timestamps. banned: tokens that are never generated, among them the special ones.
    """

    start: int
    previous: int | None
    no_speech: int | None
    tasks: dict[str, int]
    languages: dict[str, int]
    rules: TimestampRules
    banned: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, info: EngineInfo, tokenizer: Tokenizer | None) -> SpeechVocabulary:
        """That of an engine, by its generation config, or else by its tokenizer.

        Raises:
            ValueError: the model does not hear, or has no timestamps; the text says which.
        """
        if info.source is None or info.source.kind != SOUND or info.source.spectrum is None:
            raise ValueError(
                f"{info.served_model_names[0]} does not transcribe: it is no model of speech such as Whisper"
            )
        if tokenizer is None:
            raise ValueError(
                "transcriptions need a tokenizer (the engine was started with skip_tokenizer_init)"
            )
        config = info.generation_config

        def token(text: str, given: Any = None) -> int | None:
            if isinstance(given, int):
                return given
            ids = tokenizer.encode(text, add_special_tokens=False)
            return ids[0] if tokenizer.convert_ids_to_tokens(ids) == [text] else None

        plain = token("<|notimestamps|>", config.get("no_timestamps_token_id"))
        end = info.eos_token_id
        if plain is None or end is None:
            raise ValueError(
                f"{info.served_model_names[0]} has no timestamps: its windows could not be joined"
            )
        named = config.get("lang_to_id") or {}
        languages = {code: token(name, named.get(name)) for code in LANGUAGES for name in [f"<|{code}|>"]}
        # By the vocabulary, as openai/whisper: tokenizers of English models have these tokens, too.
        if not config.get("is_multilingual", bool(named) or info.vocab_size >= MULTILINGUAL_SIZE):
            languages = {}
        tasks = {name: token(f"<|{name}|>", (config.get("task_to_id") or {}).get(name)) for name in TASKS}
        suppressed = [token_id for token_id in config.get("suppress_tokens") or () if token_id >= 0]
        no_speech = token("<|nospeech|>")
        if no_speech is None:
            no_speech = token("<|nocaptions|>")  # as earlier tokenizers name it
        return cls(
            start=info.source.start_ids[0],
            previous=token("<|startofprev|>", config.get("prev_sot_token_id")),
            no_speech=no_speech,
            tasks={name: token_id for name, token_id in tasks.items() if token_id is not None},
            languages={code: token_id for code, token_id in languages.items() if token_id is not None},
            rules=TimestampRules(plain + 1, end, config.get("max_initial_timestamp_index")),
            banned=sorted({*range(end + 1, plain + 1), *suppressed}),
        )
