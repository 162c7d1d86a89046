"""Encoder-decoders generate what transformers does: batched, chunked, preempted, with cached sources or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pagewire.ipc.wire.codec import Tensor as PlainTensor
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.sources import sound_source, text_source, with_source
from tests.workers.driver import load_runner
from tests.workers.parity import NUM_TOKENS, make_prompts
from tests.workers.scheduled import BLOCK_SIZE, SETTINGS, Setting, run
from tests.workers.seq2seq.tiny import TEXTS, VOCAB, WHISPER, save
from tests.workers.versions import skip_unless_right

SOURCE_LENGTHS = (13, 4, 9, 13)
TARGET_LENGTHS = (1, 3, 6, 1)


@torch.inference_mode()
def expected_tokens(model: Any, inputs: dict[str, torch.Tensor], target: list[int]) -> list[int]:
    """The most likely tokens behind a target's beginning by transformers' forward pass, past any end of sequence.

    `generate` has rules of its own for each family.
    """
    base = model.get_encoder()(**inputs)
    ids = torch.tensor([target])
    for _ in range(NUM_TOKENS):
        logits = model(encoder_outputs=base, decoder_input_ids=ids, use_cache=False).logits[0, -1]
        ids = torch.cat([ids, logits.argmax()[None, None]], 1)
    return ids[0, len(target) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("model_type", TEXTS)
def test_texts(model_type: str, tmp_path: Path) -> None:
    skip_unless_right(model_type)
    model = save(tmp_path, model_type, TEXTS[model_type])
    sources, targets = make_prompts(VOCAB, SOURCE_LENGTHS), make_prompts(VOCAB, TARGET_LENGTHS, 2)
    expected = [
        expected_tokens(model, {"input_ids": torch.tensor([s])}, t)
        for s, t in zip(sources, targets, strict=True)
    ]
    runner, ready = load_runner(tmp_path, max_model_len=40, max_num_batched_tokens=64)
    assert ready.source is not None and ready.source.max_target_tokens == 40
    prompts = [
        with_source(text_source(s, BLOCK_SIZE), s, Prompt(t)) for s, t in zip(sources, targets, strict=True)
    ]
    for setting in SETTINGS:
        tokens, scheduler = run(runner, setting, prompts)
        assert tokens == [*expected, *expected], setting.name
        assert (scheduler.stats.num_preemptions > 0) == (setting.num_blocks < 64), setting.name


def test_sounds(tmp_path: Path) -> None:
    model = save(tmp_path, "whisper", WHISPER)
    extractor = transformers.WhisperFeatureExtractor(feature_size=80)
    generator = torch.Generator().manual_seed(0)
    sounds = [torch.randn(n, generator=generator) for n in (16000, 70000, 3)]
    targets = make_prompts(VOCAB, (1, 3, 6), 2)
    expected = [
        expected_tokens(model, dict(extractor(s.numpy(), sampling_rate=16000, return_tensors="pt")), t)
        for s, t in zip(sounds, targets, strict=True)
    ]
    runner, ready = load_runner(tmp_path, max_model_len=None, max_num_batched_tokens=2048, num_blocks=1600)
    assert ready.source is not None and ready.source.sampling_rate == 16000
    prompts = [
        with_source(
            sound_source(PlainTensor("float32", (len(s),), s.numpy().tobytes()), ready.source, BLOCK_SIZE),
            [],
            Prompt(t),
        )
        for s, t in zip(sounds, targets, strict=True)
    ]
    setting = Setting("overlap and cache", budget=2048, num_blocks=1600)
    tokens, _ = run(runner, setting, prompts, max_model_len=1600)
    assert tokens == [*expected, *expected]
