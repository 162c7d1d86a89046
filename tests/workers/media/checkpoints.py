"""Tiny random models that take pictures or sound, each with the files of its processor: a row of `MODELS` each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.workers.architectures import VOCAB_SIZE
from tests.workers.shrunk import shrunk

NUM_WORDS = 96  # token ids below are words
VISION = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
CROPPED = {  # 28 by 28 pixels of any picture
    "size": {"height": 28, "width": 28},
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
GRID = {
    "patch_size": 14,
    "merge_size": 2,
    "min_pixels": 784,
    "max_pixels": 784 * 16,
    "temporal_patch_size": 2,
}


@dataclass(frozen=True)
class MediaModel:
    """A model type, and what makes a tiny one of it.

    processor: its class. image, audio: the preprocessor's settings. settings: of the processor.
    tokens: special tokens by id. named: the tokenizer's attributes that have them. config: changes of the tiny
    configuration, merged into it. hears: it takes sounds.
    """

    name: str
    processor: str
    tokens: Mapping[int, str]
    image: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    hears: bool = False

    def write(self, folder: Path, seed: int = 0) -> Path:
        """A checkpoint with random weights, tokenizer and processor."""
        import transformers

        config = merged(shrunk(self.name).to_dict(), self.config)
        config = {key: value for key, value in config.items() if value is not None or key in self.config}
        text = config.get("text_config") or config
        text["max_position_embeddings"] = 512
        made = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
        torch.manual_seed(seed)
        kind = transformers.AutoModelForSeq2SeqLM if self.hears else transformers.AutoModelForImageTextToText
        model = kind.from_config(made, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.15)
        model.save_pretrained(folder)
        write_tokenizer(folder, self.tokens, self.named)
        if self.image:
            (folder / "preprocessor_config.json").write_text(json.dumps(dict(self.image)))
        settings = {"processor_class": self.processor, **self.settings}
        (folder / "processor_config.json").write_text(json.dumps(settings))
        return folder


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Values with changes, part by part."""
    found = dict(values)
    for name, change in changes.items():
        old = found.get(name)
        found[name] = merged(old, change) if isinstance(change, dict) and isinstance(old, dict) else change
    return found


def write_tokenizer(folder: Path, tokens: Mapping[int, str], named: Mapping[str, str]) -> None:
    """A tokenizer of words between spaces: w0, w1, ..."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    names = {f"w{i}": i for i in range(VOCAB_SIZE) if i not in tokens}
    names |= {text: i for i, text in tokens.items()}
    plain = Tokenizer(WordLevel(names, unk_token="w0"))
    plain.pre_tokenizer = WhitespaceSplit()
    plain.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in tokens.values()])
    PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="w0", pad_token="w0", extra_special_tokens=dict(named)
    ).save_pretrained(folder)


def qwen(
    name: str, processor: str, image: Mapping[str, Any] = {}, vision: Mapping[str, Any] = {}
) -> MediaModel:
    """A Qwen-VL."""
    return MediaModel(
        name,
        processor,
        {127: "<|image_pad|>", 126: "<|video_pad|>", 125: "<|vision_start|>", 124: "<|vision_end|>"},
        image={"image_processor_type": "Qwen2VLImageProcessor", **GRID, **image},
        config={"vision_config": {"depth": 2, **vision}},
    )


def idefics(name: str, processor: str, image_processor: str) -> MediaModel:
    """An Idefics 3 or SmolVLM: pictures are cut into parts, with a token of its own before each."""
    parts = {99 + 3 * row + column: f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)}
    return MediaModel(
        name,
        processor,
        {
            127: "<image>",
            126: "<fake_token_around_image>",
            125: "<global-img>",
            124: "<end_of_utterance>",
            **parts,
        },
        image={
            "image_processor_type": image_processor,
            **CROPPED,
            "size": {"longest_edge": 56},
            "max_image_size": {"longest_edge": 28},
            "do_image_splitting": True,
            "do_pad": True,
        },
        settings={"image_seq_len": 1},
        config={"scale_factor": 2},
    )


def hearing(name: str, processor: str, token: str) -> MediaModel:
    """A model that hears by an encoder like Whisper's, up to 30 seconds at a time."""
    return MediaModel(
        name,
        processor,
        {127: token},
        image={
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": 128,
            "sampling_rate": 16_000,
            "chunk_length": 30,
        },
        settings={"audio_token": token},
        hears=True,
    )


MODELS = [
    qwen("qwen2_vl", "Qwen2VLProcessor"),
    qwen("qwen2_5_vl", "Qwen2_5_VLProcessor", vision={"fullatt_block_indexes": [1], "window_size": 56}),
    *(
        qwen(
            name,
            "Qwen3VLProcessor",
            vision={"depth": 3, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
        )
        for name in ("qwen3_vl", "qwen3_vl_moe")
    ),
    MediaModel(
        "llava",
        "LlavaProcessor",
        {127: "<image>"},
        image={
            "image_processor_type": "CLIPImageProcessor",
            **CROPPED,
            "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28},
            "do_center_crop": True,
        },
        settings={
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        config={"vision_config": VISION},
    ),
    MediaModel(
        "llava_next",
        "LlavaNextProcessor",
        {127: "<image>"},
        image={
            "image_processor_type": "LlavaNextImageProcessor",
            **CROPPED,
            "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28},
            "do_center_crop": True,
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        },
        settings={
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        config={"vision_config": VISION, "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]},
    ),
    MediaModel(
        "gemma3",
        "Gemma3Processor",
        {127: "<start_of_image>", 126: "<end_of_image>", 125: "<image_soft_token>"},
        image={"image_processor_type": "Gemma3ImageProcessor", **CROPPED},
        settings={"image_seq_length": 4},
        named={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        config={"vision_config": VISION, "mm_tokens_per_image": 4},
    ),
    MediaModel(
        "mistral3",
        "PixtralProcessor",
        {127: "[IMG]", 126: "[IMG_BREAK]", 125: "[IMG_END]"},
        image={
            "image_processor_type": "PixtralImageProcessor",
            **CROPPED,
            "size": {"longest_edge": 84},
            "patch_size": {"height": 14, "width": 14},
        },
        settings={"patch_size": 14, "spatial_merge_size": 2},
        config={"vision_config": {"image_size": 84, "num_hidden_layers": 2}},
    ),
    MediaModel(
        "internvl",
        "InternVLProcessor",
        {127: "<IMG_CONTEXT>", 126: "<img>", 125: "</img>", 124: "<video>"},
        image={
            "image_processor_type": "GotOcr2ImageProcessor",
            **CROPPED,
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 3,
        },
        settings={"image_seq_length": 1},
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        config={"image_seq_length": 1},
    ),
    idefics("idefics3", "Idefics3Processor", "Idefics3ImageProcessor"),
    idefics("smolvlm", "SmolVLMProcessor", "SmolVLMImageProcessor"),
    *(
        MediaModel(
            name,
            "Glm4vProcessor",
            {127: "<|image|>", 126: "<|video|>", 125: "<|begin_of_image|>", 124: "<|end_of_image|>"},
            image={
                "image_processor_type": "Glm4vImageProcessor",
                "patch_size": 14,
                "merge_size": 2,
                "temporal_patch_size": 2,
                "size": {"shortest_edge": 2 * 784, "longest_edge": 2 * 784 * 12},
            },
        )
        for name in ("glm4v", "glm4v_moe")
    ),
    MediaModel(
        "aya_vision",
        "AyaVisionProcessor",
        {
            127: "<|IMG_PATCH|>",
            126: "<image>",
            125: "<|START_OF_IMG|>",
            124: "<|END_OF_IMG|>",
            123: "TILE_GLOBAL",
            122: "TILE_1",
            121: "TILE_2",
            120: "TILE_3",
        },
        image={
            "image_processor_type": "GotOcr2ImageProcessor",
            **CROPPED,
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 3,
        },
        settings={"patch_size": 14, "img_size": 28, "downsample_factor": 2},
        config={"vision_config": VISION, "downsample_factor": 2},
    ),
]
HEARING = [
    hearing("audioflamingo3", "AudioFlamingo3Processor", "<sound>"),
    hearing("glmasr", "GlmAsrProcessor", "<|pad|>"),
    hearing("qwen2_audio", "Qwen2AudioProcessor", "<|AUDIO|>"),
]
"""Models that take sounds."""
BY_NAME = {model.name: model for model in (*MODELS, *HEARING)}
