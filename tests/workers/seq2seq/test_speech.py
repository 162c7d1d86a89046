"""What speech is made of, beside transformers: spectrograms of excerpts, rules for timestamps, segments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import GenerationConfig, WhisperForConditionalGeneration
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from pagewire.frontend.media.spectrum import log_peak, mel_filters
from pagewire.frontend.speech.recording import Recording
from pagewire.frontend.speech.segments import divide
from pagewire.ipc.timestamps import TimestampRules
from pagewire.ipc.wire.codec import Tensor as PlainTensor
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.sources import SoundExcerpt, Spectrum
from pagewire.workers.sample.sampler import SamplingSlot, sample
from pagewire.workers.seq2seq.spectrogram import excerpt_features
from tests.workers.seq2seq.speech import RATE, noise

END, FIRST, VOCAB = 30, 40, 90
RULES = TimestampRules(FIRST, END, max_initial=10)


@pytest.mark.parametrize("num_bins", [80, 128])
def test_windows_have_columns_of_the_whole_spectrogram(num_bins: int) -> None:
    """The same bits: a quiet window is scaled by the peak of the whole."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=num_bins)
    spectrum = Spectrum(num_bins, extractor.n_fft, extractor.hop_length)
    assert np.allclose(mel_filters(RATE, spectrum), extractor.mel_filters, rtol=0, atol=1e-15)
    samples = noise(70.01) * np.linspace(0.001, 1, int(70.01 * RATE), dtype=np.float32)
    whole = extractor(
        samples, sampling_rate=RATE, return_tensors="pt", truncation=False, padding="longest"
    ).input_features[0]
    peak = log_peak(samples.tobytes(), RATE, spectrum)
    recording = Recording(
        PlainTensor("float32", samples.shape, samples.tobytes()), peak, RATE, spectrum, 3000
    )
    assert recording.num_frames == whole.shape[1] == 7001
    for seek in (0, 1, 700, 4001, 6000, 7000):
        window = recording.window(seek)
        excerpt = SoundExcerpt.of(window.excerpt)
        assert excerpt is not None
        heard = torch.frombuffer(bytearray(window.data.data), dtype=torch.float32)
        features = excerpt_features(heard, excerpt, extractor)[0]
        expected = torch.nn.functional.pad(whole[:, seek : seek + 3000], (0, max(0, seek + 3000 - 7001)))
        assert features.shape == (num_bins, 3000)
        assert torch.allclose(features, expected, rtol=0, atol=1e-6)


def random_output(rng: np.random.Generator, length: int) -> list[int]:
    """Tokens that begin as an output may: with a timestamp, times in pairs, none going back."""
    tokens, latest = [FIRST + int(rng.integers(0, 11))], 0
    latest = tokens[0]
    while len(tokens) < length:
        tokens.append(int(rng.integers(0, END)))
        if rng.random() < 0.4:
            latest = min(VOCAB - 1, latest + int(rng.integers(1, 9)))
            tokens += [latest, latest]
    return tokens[:length]


@pytest.mark.parametrize("length", range(8))
def test_timestamps_as_transformers_allows_them(length: int) -> None:
    """Over random logits: the token that sampling takes, and the log probability that it reports."""
    config = GenerationConfig(
        eos_token_id=END, bos_token_id=END, no_timestamps_token_id=FIRST - 1, max_initial_timestamp_index=10
    )
    processor = WhisperTimeStampLogitsProcessor(config, begin_index=3)
    prompt = [1, 2, 3]
    params = SamplingParams(
        temperature=0.0,
        timestamps=RULES,
        bad_words_token_ids=[[FIRST - 1]],
        logprobs=0,
        processed_logprobs=True,
    )
    for seed in range(40):
        rng = np.random.default_rng(seed)
        output = random_output(rng, length)
        logits = torch.from_numpy(rng.standard_normal((1, VOCAB)).astype(np.float32)) * 2
        logits[:, FIRST:] += float(rng.uniform(-3, 1))
        allowed = processor(torch.tensor([prompt + output]), logits.clone())
        tokens = np.array(prompt + output)
        slot = SamplingSlot(params, 0, (), tokens, len(prompt), len(tokens), VOCAB)
        sampled = sample(logits, [slot])
        assert sampled.token_ids == [int(allowed.argmax())]
        expected = torch.log_softmax(allowed, -1).max()
        assert sampled.logprobs[0].logprobs.tolist()[0] == pytest.approx(float(expected), abs=1e-5)
        # The state after tokens that come later, as drafts do, is the same.
        split = int(rng.integers(0, length + 1))
        early = SamplingSlot(params, 0, (), tokens[: 3 + split], len(prompt), 3 + split, VOCAB).ahead(
            output[split:]
        )
        assert sample(logits, [early]).token_ids == sampled.token_ids


def test_rules_for_timestamps_are_checked() -> None:
    for first, end in ((3, 3), (3, 9), (-1, 0)):
        with pytest.raises(ValueError):
            TimestampRules(first, end)
    with pytest.raises(ValueError, match="use_beam_search"):
        SamplingParams(timestamps=RULES, use_beam_search=True)


def expected_segments(tokens: list[int], num_frames: int) -> tuple[list[Any], int]:
    """By transformers, without the timestamp that begins what is cut off."""
    segments, offset = WhisperForConditionalGeneration._retrieve_segment(
        seek_sequence=torch.tensor(tokens),
        seek_outputs=[None],
        time_offset=torch.zeros(1, dtype=torch.float64),
        timestamp_begin=FIRST,
        seek_num_frames=torch.tensor([num_frames]),
        time_precision=0.02,
        time_precision_features=0.01,
        input_stride=2,
        prev_idx=0,
        idx=0,
        return_token_timestamps=False,
        decoder_input_ids=torch.zeros(1, 3),
    )
    made = []
    for segment in segments:
        ids = segment["tokens"].tolist()
        if len(ids) > 1 and ids[-2] >= FIRST and ids[-1] >= FIRST:
            ids = ids[:-1]
        made.append((ids, round(float(segment["start"]) / 0.02), round(float(segment["end"]) / 0.02)))
    return made, int(offset)


def test_segments_are_those_of_transformers() -> None:
    rng = np.random.default_rng(0)
    outputs = [random_output(rng, int(rng.integers(2, 30))) for _ in range(300)]
    outputs += [[FIRST, 5, 6], [FIRST, 5, FIRST + 9], [FIRST, 5], [FIRST + 3, 4, FIRST + 7, FIRST + 7]]
    for tokens in outputs:
        pieces, advance = divide(tokens, FIRST, 1234)
        assert ([tuple(piece) for piece in pieces], advance) == expected_segments(tokens, 1234), tokens


def test_excerpts_are_checked() -> None:
    """Bad ones are refused before the worker sees them."""
    from pagewire.ipc.wire.items import Prompt
    from pagewire.ipc.wire.sources import SourceInfo, check_source, sound_source, with_source

    info = SourceInfo("audio", 1500, 64, [1], RATE, 30 * RATE, Spectrum(80, 400, 160))

    def check(num_samples: int, options: str) -> None:
        data = PlainTensor("float32", (num_samples,), bytes(4 * num_samples))
        check_source(with_source(sound_source(data, info, 16, options), [], Prompt([1])), info, 16)

    check(1600, SoundExcerpt(0, 10, 1.0).options)
    check(30 * RATE + 400, SoundExcerpt(200, 3000, 1.0).options)
    bad = [
        (1600, SoundExcerpt(201, 10, 1.0).options),
        (1600, SoundExcerpt(-1, 10, 1.0).options),
        (1600, SoundExcerpt(0, 0, 1.0).options),
        (30 * RATE, SoundExcerpt(0, 3001, 1.0).options),
        (1600, SoundExcerpt(0, 13, 1.0).options),
        (200, SoundExcerpt(0, 1, 1.0).options),
        (31 * RATE, SoundExcerpt(0, 3000, 1.0).options),
        (1600, '{"num_before":0,"num_frames":10,"peak":1e999}'),
        (1600, '{"num_before":0,"num_frames":10}'),
        (1600, "[]"),
    ]
    for num_samples, options in bad:
        with pytest.raises(ValueError, match=r"excerpt|options of a source"):
            check(num_samples, options)
