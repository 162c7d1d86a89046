"""Pictures from a client of HTTP to the model and back: what transformers answers about the same pictures."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from openai import OpenAI
from PIL import Image

from pagewire import LLM, SamplingParams
from tests.end_to_end.server_process import ServerProcess
from tests.workers.media.checkpoints import BY_NAME

TEMPLATE = (
    "{% for m in messages %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image> {% else %}{{ p.text }} {% endif %}{% endfor %}{% endfor %}"
)
NUM_TOKENS = 8
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def picture(seed: int, height: int, width: int) -> Image.Image:
    squares = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(squares).resize((width, height), Image.Resampling.NEAREST)


PICTURES = [picture(1, 60, 90), picture(2, 80, 40), picture(3, 30, 30)]
QUESTIONS: list[list[Image.Image | str]] = [
    ["w5 w6", PICTURES[0], "w7"],
    [PICTURES[1], PICTURES[0], "w9"],
    ["w3 w4"],
    ["w8", PICTURES[2], "w2", PICTURES[1], "w1", PICTURES[0]],
]


def data_url(image: Image.Image) -> str:
    file = BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def messages_of(question: list[Image.Image | str], local: bool = False) -> list[Any]:
    parts: list[Any] = []
    for part in question:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        elif local:
            parts.append({"type": "image", "image": part})
        else:
            parts.append({"type": "image_url", "image_url": {"url": data_url(part)}})
    return [{"role": "user", "content": parts}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaVA with random weights."""
    folder = BY_NAME["llava"].write(tmp_path_factory.mktemp("llava"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(
        str(folder),
        device="cpu",
        dtype="float32",
        max_model_len=512,
        num_gpu_blocks_override=200,
        limit_mm_per_prompt={"image": 3},
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[ServerProcess]:
    spawned = llm.session._spawned
    assert spawned is not None
    server = ServerProcess(spawned.address)
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """The tokens that transformers generates."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    answers = []
    for question in QUESTIONS:
        text = "".join(f"{part} " if isinstance(part, str) else "<image> " for part in question)
        images = [part for part in question if not isinstance(part, str)]
        inputs = processor(text=[text], images=[images] if images else None, return_tensors="pt")
        with torch.inference_mode():
            found = model.generate(**inputs, do_sample=False, max_new_tokens=NUM_TOKENS, pad_token_id=0)
        answers.append(found[0, inputs["input_ids"].shape[1] :].tolist())
    return answers


def test_chat_over_http_says_what_transformers_says(
    client: OpenAI, expected: list[list[int]], folder: Path
) -> None:
    for question, tokens in zip(QUESTIONS, expected, strict=True):
        for _ in range(2):  # the second time from the caches
            answer = client.chat.completions.create(
                model=str(folder),
                messages=messages_of(question),
                temperature=0,
                max_tokens=NUM_TOKENS,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            assert answer.choices[0].token_ids == tokens  # type: ignore[attr-defined]


def test_chat_in_python_says_the_same(llm: LLM, expected: list[list[int]]) -> None:
    outputs = llm.chat([messages_of(question, True) for question in QUESTIONS], PARAMS, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


def test_what_the_model_does_not_take_is_refused(client: OpenAI, folder: Path) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "aaaa", "format": "wav"}}
    cases: list[tuple[list[Any], str]] = [
        ([{"role": "user", "content": [sound]}], "the model takes no sounds"),
        (messages_of([PICTURES[0]] * 4), "a prompt may have 3 pictures"),
        ([{"role": "user", "content": "<image> w1"}], "outside of any"),
    ]
    for messages, text in cases:
        with pytest.raises(openai.BadRequestError, match=text):
            client.chat.completions.create(model=str(folder), messages=messages)
