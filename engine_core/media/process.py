"""The program that runs a model's Hugging Face processor on media, in processes that may be lost.

    decoded medium -> processor -> the tokens that stand for it, and the features that the model's encoder takes

It imports torch and transformers, which the core never does. Each medium is processed alone, so what it becomes
does not depend on others.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pagewire.engine_core.media.jobs import Array, Describe, Described, Job, Lay, Processed, ProcessMedium
from pagewire.ipc.families.media import MediaFamily, media_family
from pagewire.ipc.host.job_server import Handler, serve
from pagewire.ipc.quoting import on_one_line, quoted, shortened
from pagewire.ipc.wire.budget import MAX_TOKENS
from pagewire.ipc.wire.codec import ITEM_SIZES

# Arguments that say what is processed and what comes of it: no request gives them.
OWN_ARGUMENTS = frozenset(
    {"text", "images", "audio", "sampling_rate", "return_tensors", "add_special_tokens"}
)
MAX_FEATURE = 1 << 15  # largest absolute value: as of embeddings, which features become
MAX_ERROR_CHARS = 300  # of a processor's error: it may quote its arguments, or itself
JOBS_PER_PROCESS = 64  # media that one process takes, one after the other
NOT_FEATURES = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels"})
BLANK = (224, 224, 3)  # the shape of a picture
RATE = 16_000  # samples a second of a processor that does not say


class Processor:
    """A model's processor.

    folder: of the model. arguments: of the processor for each medium, unless a request gives others; as JSON.

    Raises:
        ValueError: the model takes no media, its processor cannot be loaded, or has no such argument.
    """

    def __init__(self, folder: Path, arguments: str = "") -> None:
        import torch

        torch.set_num_threads(1)
        self._folder = folder
        self._config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        family = media_family(self._config)
        if family is None:
            raise ValueError(f"models of the type {self._config.get('model_type')!r} take no media")
        self._family: MediaFamily = family
        self._processor = load_processor(folder)
        self._tokens = {kind: self._tokens_of(kind) for kind in family.kinds}
        self._known = known_arguments(self._processor)
        self._arguments = self._checked(arguments)

    def describe(self) -> Described:
        """What it takes; arguments for each medium are tried on a blank one."""
        for kind in self._tokens if self._arguments else ():
            self.lay(Lay(kind, BLANK if kind == "image" else (self._rate,)))
        rate = self._rate if "audio" in self._family.kinds else 0
        return Described(self._tokens, rate)

    def lay(self, job: Lay) -> Processed:
        """The layout of a medium of some shape: that of a blank one."""
        import numpy as np

        dtype = np.uint8 if job.kind == "image" else np.float32
        return Processed(
            self._token_ids(job.kind, self._run(job.kind, np.zeros(job.shape, dtype), job.options))
        )

    def process(self, job: ProcessMedium) -> Processed:
        """The features of a medium.

        Raises:
            ValueError: it cannot be processed, or its features are not finite.
        """
        import numpy as np

        content = np.frombuffer(job.content.data, job.content.dtype).reshape(job.content.shape)
        outputs = self._run(job.kind, content, job.options)
        features = {name: array_of(value) for name, value in outputs.items() if name not in NOT_FEATURES}
        if any(map(is_unusable, outputs.values())):
            cause = "mm_processor_kwargs, or the" if job.options else "the"
            raise ValueError(
                f"{job.kind}: the model's processor makes numbers of it that are not between -{MAX_FEATURE} and "
                f"{MAX_FEATURE}: {cause} {job.kind} itself, must have smaller ones"
            )
        return Processed(self._token_ids(job.kind, outputs), features)

    @property
    def _rate(self) -> int:
        extractor = getattr(self._processor, "feature_extractor", None)
        return int(getattr(extractor, "sampling_rate", RATE))

    @property
    def _most_seconds(self) -> float:
        """The length of sounds that the processor takes whole: of one window, or as many as it makes."""
        window = getattr(getattr(self._processor, "feature_extractor", None), "chunk_length", None)
        if not window:
            return math.inf
        return float(max(getattr(self._processor, "max_audio_len", 0) // window, 1) * window)

    def _run(self, kind: str, content: Any, options: str) -> Mapping[str, Any]:
        """The processor's outputs for a prompt that is one placeholder."""
        given = self._arguments | self._checked(options)
        if kind not in self._tokens:
            raise ValueError(f"the model takes no {kind[:40]}")
        if kind == "image":
            if content.ndim != 3 or content.shape[2] != 3:
                raise ValueError(f"a picture has the shape [height, width, 3], not {list(content.shape)}")
            from PIL import Image

            given["images"] = [Image.fromarray(content)]
        else:
            if len(content) > self._most_seconds * self._rate:
                raise ValueError(
                    f"a sound of {len(content) / self._rate:.1f} seconds: the model's processor takes "
                    f"{self._most_seconds:g}, and would leave out the rest"
                )
            given["audio"] = [content]
            given["sampling_rate"] = self._rate
        given |= self._family.arguments
        text = self._tokens[kind][1]
        outputs: Mapping[str, Any] = self._processor(
            text=[text], return_tensors="pt", add_special_tokens=False, **given
        )
        return outputs

    def _checked(self, options: str) -> dict[str, Any]:
        """Arguments of the processor, from JSON; transformers would ignore those that it does not have."""
        given: dict[str, Any] = json.loads(options) if options else {}
        unknown = next((name for name in given if self._known and name not in self._known), None)
        if own := OWN_ARGUMENTS & given.keys():
            raise ValueError(f"mm_processor_kwargs: {min(own)} is given by the engine itself")
        if unknown is not None:
            raise ValueError(f"mm_processor_kwargs: the model's processor has no argument {quoted(unknown)}")
        return given

    def _token_ids(self, kind: str, outputs: Mapping[str, Any]) -> list[int]:
        row = outputs["input_ids"][0]
        if len(row) > MAX_TOKENS:
            raise ValueError(f"{kind}: it takes {len(row)} tokens, and a prompt has at most {MAX_TOKENS}")
        token_ids: list[int] = row.tolist()
        if not self._family.only_places:
            return token_ids
        return [token_id for token_id in token_ids if token_id == self._tokens[kind][2]]

    def _tokens_of(self, kind: str) -> tuple[int, str, int]:
        """The placeholder's token and text, and the token whose place takes an embedding."""
        processor = self._processor
        text = str(getattr(processor, f"{kind}_token", None) or f"<{kind}>")
        token_id = processor.tokenizer.convert_tokens_to_ids(text)
        if token_id is None:
            raise ValueError(f"the tokenizer has no token {text!r}, which stands for media")
        names = (f"{kind}_token_id", f"{kind}_token_index")
        place = next((self._config[name] for name in names if self._config.get(name) is not None), token_id)
        return token_id, text, place


def load_processor(folder: Path) -> Any:
    """The processor of a model's folder, without its part for videos.

    Raises:
        ValueError: the folder has none, or transformers cannot make it.
    """
    import transformers

    without_videos()
    try:
        own = read_json(folder / "processor_config.json").get("processor_class")
        auto = pixtral() if own == "PixtralProcessor" else transformers.AutoProcessor
        return auto.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        text = str(error).partition("\n")[0]
        raise ValueError(f"the model's processor cannot be loaded from {folder}: {text}") from error


def known_arguments(processor: Any) -> frozenset[str]:
    """The names of a processor's arguments, and of its parts'; empty if it does not say."""
    own = getattr(getattr(processor, "valid_processor_kwargs", None), "__annotations__", {})
    parts = (getattr(processor, name, None) for name in ("tokenizer", "image_processor", "feature_extractor"))
    typed = [*own.values(), *(getattr(part, "valid_kwargs", None) for part in parts)]
    if not own:
        return frozenset()
    return frozenset(own).union(*(getattr(kwargs, "__annotations__", ()) for kwargs in typed))


def without_videos() -> None:
    """Let processors be made without packages that only their part for videos needs."""
    from transformers import ImageProcessingMixin
    from transformers.models.auto.video_processing_auto import AutoVideoProcessor
    from transformers.models.smolvlm import processing_smolvlm
    from transformers.processing_utils import MODALITY_TO_BASE_CLASS_MAPPING
    from transformers.utils import is_torchvision_available

    processing_smolvlm.num2words = processing_smolvlm.num2words or str  # it counts the frames of videos
    if is_torchvision_available():
        return

    class NoVideos(ImageProcessingMixin):  # type: ignore[misc]
        """In the place of a processor of videos."""

        def __init__(self) -> None:
            self.model_input_names: list[str] = []
            self.unused_input_names: list[str] = []

    MODALITY_TO_BASE_CLASS_MAPPING["video_processor"] = "ImageProcessingMixin"
    AutoVideoProcessor.from_pretrained = lambda *_, **__: NoVideos()


def pixtral() -> Any:
    """Pixtral's processor, which takes a function from a module that needs torchvision; Pillow's has it, too."""
    import sys

    from transformers.models.pixtral import image_processing_pil_pixtral

    sys.modules.setdefault(
        "transformers.models.pixtral.image_processing_pixtral", image_processing_pil_pixtral
    )
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    return PixtralProcessor


def read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file; nothing where there is none."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return content if isinstance(content, dict) else {}


def array_of(value: Any) -> Array:
    """A feature as bytes: a tensor, or what numpy makes one of."""
    import torch

    tensor = torch.as_tensor(value).contiguous()
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEM_SIZES:
        raise ValueError(f"the processor makes a feature of {dtype}")
    return Array(
        dtype,
        tuple(tensor.shape),
        tensor.view(torch.uint8).numpy().tobytes()
        if tensor.ndim
        else tensor.reshape(1).view(torch.uint8).numpy().tobytes(),
    )


def is_unusable(value: Any) -> bool:
    """True if a feature has a number that is NaN, infinite or huge."""
    import torch

    tensor = torch.as_tensor(value)
    return tensor.is_floating_point() and not bool((tensor.abs() <= MAX_FEATURE).all())


def error_of(error: Exception) -> ValueError:
    """A processor's error as requests get it: on one line, and short."""
    text = " ".join(shortened(str(error) or type(error).__name__).split())
    return ValueError(shortened(on_one_line(text), MAX_ERROR_CHARS))


def handler(processor: Processor) -> Handler:
    """The function that does one job."""
    run: dict[type, Callable[[Any], Any]] = {
        Describe: lambda _: processor.describe(),
        Lay: processor.lay,
        ProcessMedium: processor.process,
    }

    def answer(data: bytes) -> bytes:
        job = msgspec.msgpack.decode(data, type=Job)
        try:
            return msgspec.msgpack.encode(run[type(job)](job))
        except MemoryError:
            raise
        except Exception as error:
            raise error_of(error) from None

    return answer


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(
        description="pagewire process that processes media (started by the core)"
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("arguments")
    parser.add_argument("--control", type=int, required=True)
    parser.add_argument("--lifeline", type=int, required=True)
    options = parser.parse_args()
    serve(
        options.control,
        options.lifeline,
        lambda: handler(Processor(options.folder, options.arguments)),
        lambda answer: answer(msgspec.msgpack.encode(Describe())),
        JOBS_PER_PROCESS,
    )


if __name__ == "__main__":
    main()
