"""The embedded model that sees answers truthfully, over HTTP and in a terminal, as transformers does."""

from __future__ import annotations

import base64
import random
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from PIL import Image

from pagewire import LLM, SamplingParams
from pagewire.ipc.files.hub import model_folder
from tests.benchmarks.loading import load
from tests.end_to_end.server_process import ServerProcess

scenes = load("scenes")
QUESTION = "Describe the picture."
WHITE = (255, 255, 255)
PAIRS = [
    ("red", "circle"),
    ("green", "square"),
    ("blue", "triangle"),
    ("yellow", "square"),
    ("purple", "circle"),
]
SCENES = [scenes.draw((thing,), random.Random(i), WHITE) for i, thing in enumerate(PAIRS)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        "demo-vision",
        device="cpu",
        dtype="float32",
        max_model_len=512,
        num_gpu_blocks_override=400,
        limit_mm_per_prompt={"image": 2},
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[ServerProcess]:
    spawned = llm.session._spawned
    assert spawned is not None
    server = ServerProcess(spawned.address)
    yield server
    assert server.stop() == 0


def png(picture: Image.Image) -> bytes:
    file = BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def test_answers_over_http_are_true(server: ServerProcess) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        def ask(scene: Any, question: str) -> str:
            url = f"data:image/png;base64,{base64.b64encode(png(scene.picture)).decode()}"
            parts: list[Any] = [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "text", "text": question},
            ]
            answer = client.chat.completions.create(
                model="demo-vision",
                messages=[{"role": "user", "content": parts}],
                temperature=0,
                max_tokens=40,
            )
            return answer.choices[0].message.content or ""

        for scene in SCENES:
            assert ask(scene, QUESTION) == scenes.listed(scene.things)
        (_, shape) = PAIRS[0]
        assert ask(SCENES[0], f"What colour is the {shape}?") == "The circle is red."
        assert ask(SCENES[0], "Is there a triangle?") == "No."
        assert ask(SCENES[0], "How many shapes are there?") == "There is one shape."


def test_most_answers_about_new_pictures_are_true(llm: LLM) -> None:
    rng = random.Random(77)
    pictures = [scenes.random_scene(rng) for _ in range(40)]
    asked = [(scene, *rng.choice(scenes.exchanges(scene.things))) for scene in pictures]
    chats: list[list[Any]] = [
        [
            {
                "role": "user",
                "content": [{"type": "image", "image": scene.picture}, {"type": "text", "text": text}],
            }
        ]
        for scene, text, _ in asked
    ]
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=40), use_tqdm=False)
    said = [output.outputs[0].text for output in outputs]
    right = [text == answer for text, (_, _, answer) in zip(said, asked, strict=True)]
    assert sum(right) >= 37, [(text, answer) for text, (_, _, answer) in zip(said, asked, strict=True)]


def test_tokens_are_those_of_transformers(llm: LLM) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = model_folder("demo-vision")
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    model.generation_config.eos_token_id = None
    for scene in SCENES[:3]:
        content = [{"type": "image", "image": scene.picture}, {"type": "text", "text": QUESTION}]
        chat: list[Any] = [{"role": "user", "content": content}]
        ours = llm.chat(chat, params, use_tqdm=False)[0].outputs[0].token_ids
        text = processor.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        inputs = processor(text=[text], images=[scene.picture], return_tensors="pt", add_special_tokens=False)
        with torch.inference_mode():
            made = model.generate(**inputs, do_sample=False, max_new_tokens=24, pad_token_id=0)
        assert list(ours) == made[0, inputs["input_ids"].shape[1] :].tolist()


def test_a_chat_in_a_terminal_sees(llm: LLM, tmp_path: Path) -> None:
    spawned = llm.session._spawned
    assert spawned is not None
    file = tmp_path / "picture.png"
    file.write_bytes(png(SCENES[1].picture))
    command = [sys.executable, "-m", "pagewire.cli.main", "chat", "--attach", spawned.address]
    command += ["--image", str(file), "--temperature", "0"]
    done = subprocess.run(
        command, input=f"{QUESTION}\n", capture_output=True, text=True, timeout=120, check=True
    )
    assert scenes.listed(SCENES[1].things) in done.stdout
