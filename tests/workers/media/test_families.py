"""Models that take pictures or sounds: token for token as transformers, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.steps import StepPlan, StepResult
from tests.workers.driver import load_runner
from tests.workers.media.checkpoints import HEARING, MODELS, MediaModel
from tests.workers.media.parity import (
    MediaDriver,
    Question,
    Reader,
    picture,
    sound,
    transformers_answers,
    words,
)
from tests.workers.versions import skip_before

NUM_TOKENS = 8
QUESTIONS = [
    Question([words(5, 1), picture(80, 110, 1), words(7, 2)]),
    Question([words(9, 3)]),
    Question(
        [picture(60, 40, 2), words(3, 4), picture(50, 50, 3), words(2, 5), picture(80, 110, 1), words(1, 8)]
    ),
    Question([words(2, 6), picture(120, 60, 4), words(1, 7)]),
]


WITH_TORCHVISION = {"idefics3", "smolvlm"}
SOUNDS = [
    Question([words(5, 1), sound(1.5, 1), words(7, 2)]),
    Question([words(9, 3)]),
    Question([sound(2.2, 2), words(3, 4)]),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_answers_are_those_of_transformers(model: MediaModel, tmp_path: Path) -> None:
    """Several pictures, mixed with text, batched, in chunks that cut pictures, and encoded layer by layer."""
    if model.name in WITH_TORCHVISION:
        skip_before((5, 18), "it reads pictures of this model without torchvision")
    folder = model.write(tmp_path)
    reader = Reader(folder)
    expected = transformers_answers(folder, reader, QUESTIONS, NUM_TOKENS)
    runner, ready = load_runner(folder, media=True, max_model_len=512, num_blocks=600)
    assert ready.media
    prompts = [reader.prompt(question) for question in QUESTIONS]
    assert MediaDriver(runner, reader, budget=13).generate(prompts, NUM_TOKENS) == expected
    assert MediaDriver(runner, reader, budget=400).generate(prompts, NUM_TOKENS) == expected
    assert ready.encoder_layers > 1
    driver = MediaDriver(runner, reader, budget=400, in_slices=True)
    assert driver.generate(prompts, NUM_TOKENS) == expected


@pytest.mark.parametrize("model", HEARING, ids=lambda model: model.name)
def test_answers_about_sounds_are_those_of_transformers(model: MediaModel, tmp_path: Path) -> None:
    folder = model.write(tmp_path)
    reader = Reader(folder)
    expected = transformers_answers(folder, reader, SOUNDS, NUM_TOKENS)
    runner, ready = load_runner(folder, media=True, max_model_len=512, num_blocks=600)
    assert ready.media
    prompts = [reader.prompt(question) for question in SOUNDS]
    assert MediaDriver(runner, reader, budget=13).generate(prompts, NUM_TOKENS) == expected
    assert MediaDriver(runner, reader, budget=400).generate(prompts, NUM_TOKENS) == expected
    assert ready.encoder_layers > 1
    driver = MediaDriver(runner, reader, budget=400, in_slices=True)
    assert driver.generate(prompts, NUM_TOKENS) == expected


def test_only_the_row_with_a_picture_that_cannot_be_encoded_is_spoiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What such a row has written is wrong, so the core must know it; the others of its step are as ever."""
    folder = MODELS[0].write(tmp_path)
    reader = Reader(folder)
    prompts = [reader.prompt(question) for question in QUESTIONS[:2]]
    for features in reader.features.values():
        features["pixel_values"] = Tensor("float32", (1,), bytes(4))
    runner, _ = load_runner(folder, media=True, max_model_len=512, num_blocks=600)
    results: list[StepResult] = []
    step = runner.step

    def noting(plan: StepPlan) -> StepResult:
        results.append(step(plan))
        return results[-1]

    monkeypatch.setattr(runner, "step", noting)
    with pytest.raises(AssertionError, match="the model cannot encode this image"):  # the driver's own
        MediaDriver(runner, reader, budget=400).generate(prompts, 1)
    spoiled, plain = results[0].rows
    assert spoiled.is_spoiled and not spoiled.token_ids
    assert not plain.is_spoiled and plain.error is None and len(plain.token_ids) == 1
