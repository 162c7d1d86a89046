"""Greedy tokens of prompts with pictures or sounds, by the worker and by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pagewire.engine_core.media.jobs import Array, Lay, ProcessMedium
from pagewire.engine_core.media.process import Processor
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.items import NOTHING, Media, Prompt
from pagewire.ipc.wire.media import media_name
from pagewire.ipc.wire.worker_messages import Encode, Row, StepPlan
from tests.workers.driver import Driver, Request
from tests.workers.media.checkpoints import NUM_WORDS

Picture = NDArray[np.uint8]
Sound = NDArray[np.float32]


def picture(height: int, width: int, seed: int) -> Picture:
    """A random picture uint8 [height, width, 3] of a few large squares."""
    generator = np.random.default_rng(seed)
    small = generator.integers(0, 256, (3, 3, 3), dtype=np.uint8)
    tall = np.repeat(small, -(-height // 3), 0)[:height]
    return np.ascontiguousarray(np.repeat(tall, -(-width // 3), 1)[:, :width])


def sound(seconds: float, seed: int) -> Sound:
    """A random sound float32 [samples], 16,000 a second."""
    return np.random.default_rng(seed).normal(0.0, 0.1, int(seconds * 16_000)).astype(np.float32)


def words(count: int, seed: int) -> list[int]:
    """Random tokens of words."""
    return np.random.default_rng(seed).integers(3, NUM_WORDS, count).tolist()  # type: ignore[no-any-return]


@dataclass
class Question:
    """A prompt whose parts are tokens, and pictures or sounds."""

    parts: list[list[int] | Picture | Sound]

    @property
    def pictures(self) -> list[Any]:
        return [part for part in self.parts if not isinstance(part, list) and part.dtype == np.uint8]

    @property
    def sounds(self) -> list[Any]:
        return [part for part in self.parts if not isinstance(part, list) and part.dtype == np.float32]


class Reader:
    """Makes prompts of questions, by a model's processor."""

    def __init__(self, folder: Path) -> None:
        self.processor = Processor(folder)
        self.whole = self.processor._family.whole
        self.features: dict[bytes, dict[str, Tensor]] = {}

    def prompt(self, question: Question) -> Prompt:
        """The prompt, with media that have their grid in place of their content, as workers get them."""
        token_ids: list[int] = []
        media: list[Media] = []
        for part in question.parts:
            if isinstance(part, list):
                token_ids += part
                continue
            kind, content = (
                "image" if part.dtype == np.uint8 else "audio",
                (str(part.dtype), part.shape, part.tobytes()),
            )
            made = self.processor.process(ProcessMedium(kind, Array(*content)))
            laid = self.processor.lay(Lay(kind, part.shape))
            assert laid.token_ids == made.token_ids and not laid.features
            name = media_name(kind, Tensor(*content), "")
            self.features[name] = {k: Tensor(v.dtype, v.shape, v.data) for k, v in made.features.items()}
            grid = self.features[name].get("image_grid_thw", NOTHING)
            media.append(Media(len(token_ids), len(made.token_ids), name, grid, kind=kind))
            token_ids += made.token_ids
        return Prompt(token_ids, media)


class MediaDriver(Driver):
    """A `Driver` that has media encoded when rows reach them; in_slices: in earlier steps, layer by layer."""

    def __init__(self, runner: Any, reader: Reader, budget: int = 16, *, in_slices: bool = False) -> None:
        super().__init__(runner, budget)
        self._reader, self._in_slices = reader, in_slices
        self._entries: dict[bytes, int] = {}

    def _chunk(self, request: Request, count: int) -> int:
        """Up to a medium that does not fit, where its tokens see each other."""
        end = request.computed + count
        for medium in request.content.media if self._reader.whole else ():
            if medium.start < end < medium.end:
                end = medium.start
        return end - request.computed

    def _run(self, rows: list[Row], scheduled: list[Request], inits: list[Any]) -> None:
        encodes = []
        for row, request in zip(rows, scheduled, strict=True):
            for medium in request.content.media:
                if medium.start >= row.start + row.num_tokens or medium.end <= row.start:
                    continue
                if medium.name not in self._entries:
                    self._entries[medium.name] = len(self._entries)
                    encodes.append(
                        Encode(self._entries[medium.name], medium.kind, self._reader.features[medium.name])
                    )
                row.entries = [*row.entries, (medium.start, medium.end, self._entries[medium.name])]
        if self._in_slices:
            encodes = [self._last_slice(encode) for encode in encodes]
        self.step_id += 1
        result = self.runner.step(StepPlan(self.step_id, rows, inits, encodes=encodes))
        for row, row_result, request in zip(rows, result.rows, scheduled, strict=True):
            assert row_result.error is None, row_result.error
            request.computed += row.num_tokens
            request.take(row_result)

    def _last_slice(self, encode: Encode) -> Encode:
        """Run a pass up to its last layer; returns what is left of it."""
        for until in range(1, self.runner.media.num_layers):
            features = encode.features if until == 1 else {}
            slice_ = Encode(encode.entry, encode.kind, features, until)
            self.step_id += 1
            assert self.runner.step(StepPlan(self.step_id, [], encodes=[slice_])).num_rows == 0
        return Encode(encode.entry, encode.kind, {})


def transformers_answers(
    folder: Path, reader: Reader, questions: Sequence[Question], num_tokens: int
) -> list[list[int]]:
    """What `generate` gives for each question, its pictures processed together."""
    import transformers

    model_class = getattr(transformers, reader.processor._config["architectures"][0])
    model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return [answer(model, reader, question, num_tokens) for question in questions]


@torch.inference_mode()
def answer(model: Any, reader: Reader, question: Question, num_tokens: int) -> list[int]:
    """What `generate` of transformers' model gives."""
    from PIL import Image

    prompt = reader.prompt(question)
    processor, (place, *_) = reader.processor._processor, reader.processor._tokens.values()
    ids = torch.tensor([prompt.token_ids])
    inputs: dict[str, Any] = {}
    if question.pictures:
        text = " ".join([place[1]] * len(question.pictures))
        images = [[Image.fromarray(x) for x in question.pictures]]
        inputs = dict(processor(text=[text], images=images, return_tensors="pt"))
        del inputs["input_ids"]
    if question.sounds:
        (text, own) = place[1], {"sampling_rate": 16_000}
        inputs = dict(processor(text=[text], audio=question.sounds, return_tensors="pt", **own))
        del inputs["input_ids"]
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inputs:
            inputs[name] = (ids == place[2]).int()
    inputs["attention_mask"] = torch.ones_like(ids)
    found = model.generate(
        input_ids=ids,
        **inputs,
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        pad_token_id=0,
    )
    return found[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]
