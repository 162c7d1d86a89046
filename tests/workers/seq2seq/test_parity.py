"""Encoder-decoders generate what transformers does: batched, chunked, preempted, with cached sources and without."""

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

SOURCE_LENGTHS = (13, 4, 9, 13)
TARGET_LENGTHS = (1, 3, 6, 1)


def expected_tokens(model: Any, inputs: dict[str, torch.Tensor], target: list[int]) -> list[int]:
    """What transformers' `generate` gives behind a target's beginning, past any end of sequence."""
    model.generation_config.eos_token_id = None
    found = model.generate(
        **inputs,
        decoder_input_ids=torch.tensor([target]),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        num_beams=1,
        use_cache=False,  # T5's cache has as many layers as the encoder
    )
    return found[0, len(target) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("model_type", TEXTS)
def test_texts(model_type: str, tmp_path: Path) -> None:
    model = save(tmp_path, model_type, TEXTS[model_type])
    sources, targets = make_prompts(VOCAB, SOURCE_LENGTHS), make_prompts(VOCAB, TARGET_LENGTHS, 2)
    for target in targets:
        target[0] = model.config.decoder_start_token_id  # which `generate` would put before it
    expected = [
        expected_tokens(
            model, {"input_ids": torch.tensor([s]), "attention_mask": torch.ones(1, len(s), dtype=torch.long)}, t
        )
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
    targets = [[2, *prompt] for prompt in make_prompts(VOCAB, (1, 3, 6), 2)]
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
    tokens, scheduler = run(runner, setting, prompts, max_model_len=1600)
    assert tokens == [*expected, *expected]
