"""Speech to text over HTTP and on the command line: what transformers generates of the same recordings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai import OpenAI
from transformers import WhisperFeatureExtractor

from pagewire.cli.main import main
from tests.cli.command import start_core
from tests.end_to_end.conftest import SMALL_CORE
from tests.end_to_end.http_server import Server
from tests.workers.seq2seq.speech import FIRST, IDS, RATE, noise, save_whisper, tokenizer, wav

RECORDING = noise(75, 3)
MAX_UPLOAD = 6 << 20
PLAIN = {"logprob_threshold": -1000, "compression_ratio_threshold": 1000, "no_speech_threshold": 2}
"""Takes the first attempt at each window."""


class Hearing:
    """A core and a server on a tiny Whisper, and transformers' model."""

    def __init__(self, folder: Path, ends: ExitStack) -> None:
        self.model = save_whisper(folder)
        self.folder, self.address = folder, f"ipc://{folder}/core.sock"
        options = ("--served-model-name", "whisper", *SMALL_CORE)
        core = start_core(self.address, "--model", str(folder), *options)
        ends.callback(core.communicate, timeout=60)
        ends.callback(core.terminate)
        keys = ("--api-key", "first", "--api-key", "second", "--max-upload-bytes", str(MAX_UPLOAD))
        self.server = Server(folder, "--attach", self.address, "--port", "0", *keys)
        ends.callback(self.server.stop)
        url = f"{self.server.url}/v1"
        self.client = ends.enter_context(OpenAI(base_url=url, api_key="first", max_retries=0))

    def ids(self, text: str) -> list[int]:
        return tokenizer().encode(text, add_special_tokens=False).ids

    def transcribe(self, recording: Any = RECORDING, **fields: Any) -> Any:
        return self.client.audio.transcriptions.create(
            file=("a.wav", wav(recording)),
            model=fields.pop("model", "whisper"),
            extra_body=PLAIN | fields.pop("extra", {}),
            **fields,
        )


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hearing]:
    with ExitStack() as ends:
        yield Hearing(tmp_path_factory.mktemp("whisper"), ends)


@torch.inference_mode()
def expected_segments(
    hearing: Hearing, recording: Any, **options: Any
) -> list[tuple[float, float, list[int]]]:
    """Times and tokens by `generate` of transformers, without the timestamp that begins a segment cut off."""
    extractor = WhisperFeatureExtractor.from_pretrained(hearing.folder)
    inputs = extractor(
        recording,
        sampling_rate=RATE,
        return_tensors="pt",
        truncation=False,
        padding="longest",
        return_attention_mask=True,
    )
    made = hearing.model.generate(
        **inputs,
        return_timestamps=True,
        return_segments=True,
        temperature=(0.0,),
        max_new_tokens=hearing.model.config.max_target_positions // 2,
        **{"language": "en", "task": "transcribe"} | options,
    )
    segments = []
    for segment in made["segments"][0]:
        ids = segment["tokens"].tolist()
        if ids[-2] >= FIRST:
            ids = ids[:-1]
        segments.append((round(float(segment["start"]), 3), round(float(segment["end"]), 3), ids))
    return segments


def segments_of(answer: Any) -> list[tuple[float, float, list[int]]]:
    return [(round(part.start, 3), round(part.end, 3), part.tokens) for part in answer.segments]


@pytest.mark.parametrize("conditioned", [False, True])
def test_a_long_recording_as_transformers_has_it(hearing: Hearing, conditioned: bool) -> None:
    answer = hearing.transcribe(
        language="en",
        response_format="verbose_json",
        timestamp_granularities=["segment"],
        extra={"condition_on_previous_text": conditioned},
    )
    expected = expected_segments(hearing, RECORDING, condition_on_prev_tokens=conditioned)
    assert segments_of(answer) == expected and len(expected) > 8
    assert any(part.seek % 3000 for part in answer.segments), "a window begins where the last one ended"
    assert (answer.duration, answer.language, answer.task) == (75.0, "english", "transcribe")
    assert answer.usage.seconds == 75.0
    assert [part.id for part in answer.segments] == list(range(len(expected)))
    assert {part.temperature for part in answer.segments} == {0.0}
    assert answer.text == "".join(part.text for part in answer.segments).strip()


def test_a_short_recording_its_language_and_a_translation(hearing: Hearing) -> None:
    short = noise(7.3, 5)
    whole = hearing.transcribe(response_format="verbose_json")
    assert segments_of(whole) == expected_segments(
        hearing, RECORDING, language=None, condition_on_prev_tokens=True
    )
    assert whole.language in ("german", "french"), "English would be what a failure takes"
    mine = hearing.transcribe(short, language="fr", response_format="verbose_json")
    assert segments_of(mine) == expected_segments(hearing, short, language="fr")
    answer: Any = hearing.client.audio.translations.create(
        file=("a.wav", wav(short)),
        model="whisper",
        response_format="verbose_json",
        extra_body=PLAIN | {"language": "German"},
    )
    expected = expected_segments(hearing, short, language="de", task="translate")
    assert segments_of(answer) == expected and answer.language == "english"


def test_formats(hearing: Hearing) -> None:
    whole = hearing.transcribe(language="en", response_format="verbose_json")
    assert hearing.transcribe(language="en").text == whole.text
    assert hearing.transcribe(language="en", response_format="text") == whole.text + "\n"
    times = [f"{clock(part.start)} --> {clock(part.end)}" for part in whole.segments]
    lines = [" ".join(part.text.split()) for part in whole.segments]
    vtt = "".join(f"{time}\n{line}\n\n" for time, line in zip(times, lines, strict=True))
    assert hearing.transcribe(language="en", response_format="vtt") == f"WEBVTT\n\n{vtt}"
    srt = "".join(
        f"{number}\n{time.replace('.', ',')}\n{line}\n\n"
        for number, (time, line) in enumerate(zip(times, lines, strict=True), 1)
    )
    assert hearing.transcribe(language="en", response_format="srt") == srt


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds * 1000), 60_000)
    return f"00:{minutes:02d}:{rest // 1000:02d}.{rest % 1000:03d}"


def test_a_stream_says_what_the_whole_answer_says(hearing: Hearing) -> None:
    whole = hearing.transcribe(language="en", response_format="verbose_json")
    *deltas, done = hearing.transcribe(language="en", stream=True)
    assert {event.type for event in deltas} == {"transcript.text.delta"}
    assert done.type == "transcript.text.done" and done.text == whole.text
    assert len(deltas) == len(whole.segments)
    assert "".join(event.delta for event in deltas).rstrip() == whole.text


def test_the_temperature_rises_while_text_is_unlikely(hearing: Hearing) -> None:
    """The log probability of random weights is never good enough, so the last attempt counts."""
    sound = noise(20, 1)
    plain = hearing.transcribe(sound, language="en", response_format="verbose_json")
    assert max(part.avg_logprob for part in plain.segments) < -1
    risen = hearing.transcribe(
        sound, language="en", response_format="verbose_json", extra={"logprob_threshold": -1}
    )
    assert {part.temperature for part in risen.segments} == {1.0}
    low = min(part.avg_logprob for part in plain.segments) - 0.1
    enough = hearing.transcribe(
        sound, language="en", response_format="verbose_json", extra={"logprob_threshold": low}
    )
    assert segments_of(enough) == segments_of(plain)
    fixed = hearing.transcribe(sound, language="en", response_format="verbose_json", temperature=0.7)
    assert {part.temperature for part in fixed.segments} == {0.7}


@torch.inference_mode()
def test_probabilities_are_those_of_transformers(hearing: Hearing) -> None:
    """Of the tokens after all rules, with the end of text; and of silence after the start."""
    sound, model = noise(14, 6), hearing.model
    answer = hearing.transcribe(sound, language="fr", response_format="verbose_json")
    extractor = WhisperFeatureExtractor.from_pretrained(hearing.folder)
    features = extractor(
        sound, sampling_rate=RATE, return_tensors="pt", truncation=False, padding="longest"
    ).input_features
    features = torch.nn.functional.pad(features, (0, 3000 - features.shape[2]))
    start = torch.tensor([[IDS["<|startoftranscript|>"]]])
    silence = model(input_features=features, decoder_input_ids=start).logits[0, 0].softmax(-1)
    first = answer.segments[0]
    assert first.no_speech_prob == pytest.approx(float(silence[IDS["<|nospeech|>"]]), rel=1e-3)
    made = model.generate(
        features,
        language="fr",
        task="transcribe",
        return_timestamps=True,
        max_new_tokens=model.config.max_target_positions // 2,
        return_dict_in_generate=True,
        output_scores=True,
    )
    result = made["segments"][0][0]["result"]
    average = model._retrieve_avg_logprobs(result["scores"], result["sequences"], 0.0)
    assert first.avg_logprob == pytest.approx(float(average), rel=1e-3)


def test_unlikely_windows_are_left_out_as_silence(hearing: Hearing) -> None:
    sound = noise(20, 1)
    plain = hearing.transcribe(sound, language="en", response_format="verbose_json")
    assert all(0 < part.no_speech_prob < 1 for part in plain.segments)
    low = min(part.no_speech_prob for part in plain.segments) / 2
    extra = {"no_speech_threshold": low, "logprob_threshold": -1}
    assert hearing.transcribe(sound, language="en", extra=extra).text == ""


def test_a_prompt_stands_before(hearing: Hearing) -> None:
    """As earlier text, of which special tokens are no part."""
    sound = noise(9, 8)
    prompted = hearing.transcribe(sound, language="en", prompt="Hello, world", response_format="verbose_json")
    ids = [hearing.model.generation_config.prev_sot_token_id, *hearing.ids(" Hello, world")]
    expected = expected_segments(hearing, sound, prompt_ids=torch.tensor(ids))
    assert segments_of(prompted) == expected
    again = hearing.transcribe(sound, language="en", prompt="<|startoftranscript|>Hello, world")
    assert again.text == hearing.transcribe(sound, language="en", prompt="Hello, world").text


def test_requests_that_are_refused(hearing: Hearing) -> None:
    short = noise(1)
    refused: list[tuple[dict[str, Any], str, str]] = [
        ({"language": "xx"}, "unknown language", "language"),
        ({"language": "ja"}, "does not know japanese", "language"),
        (
            {"response_format": "verbose_json", "timestamp_granularities": ["word"]},
            "words are not served",
            "",
        ),
        ({"timestamp_granularities": ["segment"]}, "needs response_format=verbose_json", ""),
        ({"response_format": "srt", "stream": True}, "has no events", "stream"),
        ({"include": ["logprobs"]}, "log probabilities of tokens are not returned", "include[]"),
        ({"chunking_strategy": "auto"}, "divided by the model's own timestamps", "chunking_strategy"),
    ]
    for fields, reason, param in refused:
        with pytest.raises(openai.BadRequestError, match=reason) as caught:
            hearing.transcribe(short, **fields)
        assert not param or caught.value.param == param
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        hearing.transcribe(short, model="other")
    for fields in ({"temperature": 2}, {"response_format": "diarized_json"}):
        with pytest.raises(openai.UnprocessableEntityError):
            hearing.transcribe(short, **fields)
    for data, reason in ((b"no sound", "none of the formats"), (wav(noise(0.05)), "less than 0.1 s")):
        with pytest.raises(openai.BadRequestError, match=f"file: .*{reason}") as caught:
            hearing.client.audio.transcriptions.create(file=("a.wav", data), model="whisper")
        assert caught.value.param == "file"
    with pytest.raises(openai.APIStatusError, match="over 6291456 bytes") as large:
        hearing.transcribe(noise(100))
    assert large.value.status_code == 413


def test_a_key_is_checked_before_the_body_is_read(hearing: Hearing) -> None:
    """The body never comes, and the answer does."""
    connection = hearing.server.connect()
    connection.putrequest("POST", "/v1/audio/transcriptions")
    for name, value in (("content-type", "multipart/form-data; boundary=x"), ("content-length", "1000000")):
        connection.putheader(name, value)
    connection.endheaders()
    assert connection.getresponse().status == 401
    connection.close()


def test_the_command_line(
    hearing: Hearing, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "recording.wav"
    file.write_bytes(wav(noise(12, 4)))
    monkeypatch.setenv("PAGEWIRE_API_KEY", "second")
    by_server = ["--url", hearing.server.url]
    by_core = ["--attach", hearing.address]

    def transcribed(*options: str) -> str:
        assert main(["transcribe", str(file), "--language", "en", *options]) == 0
        return capsys.readouterr().out

    for form in ("srt", "vtt", "json"):
        mine = transcribed(*by_core, "--format", form, "--temperature", "0.0001")
        assert mine == transcribed(*by_server, "--format", form, "--temperature", "0.0001")
    segments = json.loads(transcribed(*by_core, "--format", "json", "--temperature", "0.0001"))["segments"]
    text = "".join(segment["text"] for segment in segments).strip()
    assert transcribed(*by_core, "--temperature", "0.0001").strip() == text
    mistakes = [
        ([*by_core, "--api-key", "k"], "--api-key needs --url"),
        ([*by_server, *by_core], "--attach has no effect with --url"),
        ([*by_core, "--temperature", "2"], "must be from 0 to 1"),
    ]
    for options, reason in mistakes:
        assert main(["transcribe", str(file), *options]) == 2
        assert reason in capsys.readouterr().err
    assert main(["transcribe", str(tmp_path / "none.wav"), *by_core]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["transcribe", str(file), *by_server, "--model", "other"]) == 1
    assert "the server answered 404: there is no model 'other'" in capsys.readouterr().err
