"""Prompts with pictures through frontend, core and worker, on a tiny random Qwen 2 VL."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire import LLM, LoRARequest, SamplingParams
from tests.end_to_end.test_adapters import matrices, write_adapter
from tests.workers.media.checkpoints import BY_NAME, HEARING
from tests.workers.media.parity import Question, Reader, picture, sound, transformers_answers, words

NUM_TOKENS = 24
MODEL = BY_NAME["qwen2_vl"]
QUESTIONS = [
    Question([words(5, 1), picture(80, 110, 1), words(7, 2)]),
    Question([words(9, 3)]),
    Question(
        [picture(60, 40, 2), words(3, 4), picture(50, 50, 3), words(2, 5), picture(80, 110, 1), words(1, 8)]
    ),
    Question([words(2, 6), picture(120, 60, 4), words(1, 7)]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODEL.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reader(folder: Path) -> Reader:
    return Reader(folder)


@pytest.fixture(scope="module")
def answers(folder: Path, reader: Reader) -> list[list[int]]:
    """Those of transformers."""
    return transformers_answers(folder, reader, QUESTIONS, NUM_TOKENS)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    """An engine whose steps cut pictures, and whose blocks do not hold many requests at once."""
    options: dict[str, Any] = {
        "limit_mm_per_prompt": "image=3",
        "dtype": "float32",
        "max_num_batched_tokens": 13,
        "max_model_len": 128,
        "num_gpu_blocks_override": 10,
        "enable_lora": True,
    }
    with LLM(str(folder), **options) as llm:
        yield llm


def prompts(reader: Reader, questions: list[Question]) -> list[dict[str, Any]]:
    """Prompts of tokens with placeholders, and pictures."""
    place = reader.processor._tokens["image"][0]
    found: list[dict[str, Any]] = []
    for question in questions:
        token_ids = [
            token_id for part in question.parts for token_id in (part if isinstance(part, list) else [place])
        ]
        found.append({"prompt_token_ids": token_ids})
        if question.pictures:
            found[-1]["multi_modal_data"] = {"image": question.pictures}
    return found


def tokens(llm: LLM, given: list[dict[str, Any]], count: int = NUM_TOKENS, **more: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(given, params, **more)]


def count(llm: LLM, name: str) -> int:
    """The value of a counter."""
    values = {metric.name.partition(":")[2]: getattr(metric, "value", None) for metric in llm.get_metrics()}
    return int(values[name])  # type: ignore[arg-type]


def test_answers_are_those_of_transformers_and_a_picture_is_encoded_once(
    llm: LLM, reader: Reader, answers: list[list[int]]
) -> None:
    """Also where 32 requests with the same pictures come at once, of which some are preempted."""
    assert tokens(llm, prompts(reader, QUESTIONS)) == answers
    encoded = count(llm, "encoder_cache_queries") - count(llm, "encoder_cache_hits")
    processed = count(llm, "media_queries") - count(llm, "media_hits")
    assert encoded == processed == 4
    assert tokens(llm, prompts(reader, QUESTIONS * 8)) == answers * 8
    assert count(llm, "encoder_cache_queries") - count(llm, "encoder_cache_hits") == 4
    assert count(llm, "media_queries") - count(llm, "media_hits") == 4
    assert count(llm, "num_preemptions") > 0
    llm.reset_mm_cache()
    llm.reset_prefix_cache()
    assert tokens(llm, prompts(reader, QUESTIONS)) == answers
    assert count(llm, "encoder_cache_queries") - count(llm, "encoder_cache_hits") == 8


def test_a_prefix_that_covers_a_picture_needs_no_encoder(
    llm: LLM, reader: Reader, answers: list[list[int]]
) -> None:
    llm.reset_mm_cache()
    tokens(llm, prompts(reader, QUESTIONS[2:3]))
    before = count(llm, "encoder_cache_queries")
    (longer,) = prompts(reader, QUESTIONS[2:3])
    longer["prompt_token_ids"] += words(20, 9)
    tokens(llm, [longer])
    between = count(llm, "encoder_cache_queries")
    tokens(llm, [longer])
    assert between - before <= 1, "the prefix ends within the last picture, or behind it"
    assert count(llm, "encoder_cache_queries") == between


def test_nothing_is_lost_when_the_worker_is_killed(
    llm: LLM, reader: Reader, answers: list[list[int]]
) -> None:
    llm.reset_prefix_cache()
    before = count(llm, "worker_restarts")

    def kill() -> None:
        first = count(llm, "generation_tokens")
        while count(llm, "generation_tokens") - first < 20:
            time.sleep(0.01)
        status = llm.llm_engine.session.call("status").result()
        os.kill(status["worker_pid"], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    assert tokens(llm, prompts(reader, QUESTIONS * 4)) == answers * 4
    thread.join()
    assert count(llm, "worker_restarts") == before + 1


def test_an_adapter_changes_the_text_part(
    llm: LLM, reader: Reader, folder: Path, tmp_path: Path, answers: list[list[int]]
) -> None:
    """Its answers are those of transformers with the adapter added to the weights; others keep theirs."""
    from transformers import AutoModelForImageTextToText

    adapter = write_adapter(tmp_path / "adapter", 4, 1)
    tensors = load_file(adapter / "adapter_model.safetensors")
    names = {name: name.replace("model.layers", "model.language_model.layers") for name in tensors}
    save_file(
        {names[name]: tensor for name, tensor in tensors.items()}, adapter / "adapter_model.safetensors"
    )
    merged = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, (down, up) in matrices(4, 1).items():
            merged.get_submodule(name.replace("model.layers", "model.language_model.layers")).weight += (
                2 * up @ down
            )
    merged.save_pretrained(tmp_path / "merged")
    for file in folder.iterdir():
        if not (tmp_path / "merged" / file.name).exists():
            (tmp_path / "merged" / file.name).write_bytes(file.read_bytes())
    expected = transformers_answers(tmp_path / "merged", reader, QUESTIONS, NUM_TOKENS)
    assert expected != answers
    request = LoRARequest("one", 1, str(adapter))
    given = prompts(reader, QUESTIONS)
    mixed = tokens(llm, [*given, *given], lora_request=[request] * 4 + [None] * 4)
    assert mixed == expected + answers


def test_more_pictures_than_the_engine_takes_are_refused(llm: LLM, reader: Reader) -> None:
    place = reader.processor._tokens["image"][0]
    many = {"prompt_token_ids": [place] * 4, "multi_modal_data": {"image": [picture(30, 30, 1)] * 4}}
    with pytest.raises(ValueError, match=r"may have 3 (pictures|image)"):
        tokens(llm, [many])


def test_a_processor_that_cannot_be_had_ends_the_start_with_its_reason(tmp_path: Path) -> None:
    folder = MODEL.write(tmp_path / "model")
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "NoSuchProcessor"}')
    (folder / "processor_config.json").unlink(missing_ok=True)
    options: dict[str, Any] = {"num_gpu_blocks_override": 10, "max_model_len": 64}
    with pytest.raises(ValueError, match=r"processor cannot be loaded.*--limit-mm-per-prompt image=0"):
        LLM(str(folder), **options)
    with pytest.raises(ValueError, match="mm_processor_kwargs: the engine takes no pictures"):
        LLM(str(folder), limit_mm_per_prompt="image=0", mm_processor_kwargs={"do_resize": True}, **options)
    with LLM(str(folder), limit_mm_per_prompt="image=0", **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=2)
        assert llm.generate({"prompt_token_ids": [5, 6]}, params)[0].outputs[0].token_ids


def test_arguments_of_the_engine_reach_the_processor(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="mm_processor_kwargs: the model's processor has no argument 'num_crop'"
    ):
        LLM(str(MODEL.write(tmp_path)), mm_processor_kwargs={"num_crop": 1})


def test_a_sound_is_heard(tmp_path: Path) -> None:
    (model,) = (model for model in HEARING if model.name == "qwen2_audio")
    folder, samples = model.write(tmp_path), sound(1.5, 1)
    reader = Reader(folder)
    (answer,) = transformers_answers(folder, reader, [Question([words(5, 1), samples])], NUM_TOKENS)
    place = reader.processor._tokens["audio"][0]
    prompt: Any = {
        "prompt_token_ids": [*words(5, 1), place],
        "multi_modal_data": {"audio": (samples, 16_000)},
    }
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(folder), dtype="float32", max_model_len=256, num_gpu_blocks_override=64) as llm:
        assert llm.generate(prompt, params)[0].outputs[0].token_ids == answer
        with pytest.raises(ValueError, match="the model takes audio only"):
            llm.generate(prompt | {"multi_modal_data": {"image": picture(20, 20, 1)}}, params)


@pytest.mark.parametrize("ranks", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_pictures_are_encoded_in_slices_beside_streams(
    folder: Path, reader: Reader, answers: list[list[int]], ranks: dict[str, int]
) -> None:
    """With the same tokens; and what is encoded is gone, and made again, after the workers have slept.

    In the second round nothing is waited for but steps: the features of all pictures are there.
    """
    options: dict[str, Any] = {"limit_mm_per_prompt": "image=3", "dtype": "float32", "max_model_len": 128}
    options |= {"num_gpu_blocks_override": 80, "max_num_batched_tokens": 26, "max_step_ms": 1, **ranks}
    with LLM(str(folder), **options) as llm:
        given = prompts(reader, [QUESTIONS[1], *QUESTIONS])
        long = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        short = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        for number in (1, 2):
            outputs = llm.generate(given, [long] + [short] * len(QUESTIONS))
            assert [list(output.outputs[0].token_ids) for output in outputs[1:]] == answers
            encoded = count(llm, "encoder_cache_queries") - count(llm, "encoder_cache_hits")
            assert encoded == 4 * number
            llm.sleep(level=1)
            llm.wake_up()
        assert count(llm, "encoder_slices") > 0
        assert count(llm, "worker_restarts") == 0
