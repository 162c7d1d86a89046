"""The program that runs a model's processor: its arguments, and sounds that it would cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pagewire.engine_core.media.jobs import Array, Lay, ProcessMedium
from pagewire.engine_core.media.process import Processor, handler
from tests.workers.media.checkpoints import BY_NAME

PICTURE = (56, 84, 3)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2-VL, whose pictures get as many tokens as they have pixels."""
    return BY_NAME["qwen2_vl"].write(tmp_path_factory.mktemp("qwen"))


def options(**arguments: Any) -> str:
    return json.dumps(arguments)


def test_arguments_of_the_engine_hold_unless_a_request_gives_others(qwen: Path) -> None:
    small = options(size={"shortest_edge": 784, "longest_edge": 784})
    plain, engine = Processor(qwen), Processor(qwen, small)
    full = plain.lay(Lay("image", PICTURE)).token_ids
    least = plain.lay(Lay("image", PICTURE, small)).token_ids
    assert len(least) < len(full)
    assert engine.lay(Lay("image", PICTURE)).token_ids == least
    other = options(size={"shortest_edge": 784, "longest_edge": 784 * 16})
    assert engine.lay(Lay("image", PICTURE, other)).token_ids == full
    picture = ProcessMedium("image", Array("uint8", PICTURE, bytes(np.zeros(PICTURE, np.uint8).data)))
    assert engine.process(picture).token_ids == least


def test_an_argument_that_the_processor_lacks_is_refused(qwen: Path) -> None:
    wrong = options(num_crop=4)
    with pytest.raises(ValueError, match=r"mm_processor_kwargs: .* no argument 'num_crop'"):
        Processor(qwen, wrong)
    with pytest.raises(ValueError, match=r"mm_processor_kwargs: .* no argument 'num_crop'"):
        Processor(qwen).lay(Lay("image", PICTURE, wrong))


@pytest.mark.parametrize(
    "given", [{"image_mean": [1e39] * 3}, {"image_std": [0.0] * 3}, {"image_mean": [1e9] * 3}]
)
def test_features_that_no_model_computes_with_are_refused(qwen: Path, given: dict[str, Any]) -> None:
    pixels = bytes(np.zeros(PICTURE, np.uint8).data)
    job = ProcessMedium("image", Array("uint8", PICTURE, pixels), options(**given))
    with pytest.raises(
        ValueError, match=r"image: .* mm_processor_kwargs, or the image itself, must have smaller"
    ):
        Processor(qwen).process(job)


@pytest.mark.parametrize(
    "given", [{"padding": "q" * 3000}, {"image_mean": "\n" * 3000}, {"size": {"z" * 3000: 1}}]
)
def test_errors_of_processors_are_short(qwen: Path, given: dict[str, Any]) -> None:
    """They quote what they are given, some of them the whole processor."""
    job = Lay("image", PICTURE, options(**given))
    with pytest.raises(ValueError, match=r".+") as caught:
        handler(Processor(qwen))(msgspec.msgpack.encode(job))
    assert len(str(caught.value)) < 350 and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["return_tensors", "text", "images", "sampling_rate"])
def test_arguments_of_the_engine_itself_are_refused(qwen: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"mm_processor_kwargs: {name} is given by the engine itself"):
        Processor(qwen).lay(Lay("image", PICTURE, options(**{name: "x"})))


def test_a_value_that_fails_is_seen_at_the_start(qwen: Path) -> None:
    processor = Processor(qwen, options(size={"shortest_edge": "much"}))
    with pytest.raises(Exception, match=r".+"):
        processor.describe()


@pytest.mark.parametrize(("name", "seconds"), [("qwen2_audio", 30), ("glmasr", 630)])
def test_a_sound_that_would_be_cut_is_refused(
    name: str, seconds: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    processor = Processor(BY_NAME[name].write(tmp_path_factory.mktemp(name)))
    rate = processor.describe().sampling_rate
    assert processor.lay(Lay("audio", (seconds * rate,))).token_ids
    with pytest.raises(
        ValueError, match=f"the model's processor takes {seconds}, and would leave out the rest"
    ):
        processor.lay(Lay("audio", (seconds * rate + 1,)))
