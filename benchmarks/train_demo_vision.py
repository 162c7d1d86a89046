"""Train the embedded demo model that sees: a tiny LLaVA on pictures of coloured shapes.

    python -m benchmarks.train_demo_vision --out pagewire/demo_vision --minutes 15
    python -m benchmarks.train_demo_vision --out pagewire/demo_vision --minutes 9 --more  # trains it further

Pictures are drawn while it trains: one to three shapes, from left to right, on plain or noisy grounds. Questions
and answers are sentences about them. The model card is written with what was really reached on pictures that it was
not trained on.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)

from benchmarks.scenes import COLOURS, SHAPES, Scene, exchanges, random_scene
from benchmarks.train_demo import learning_rate, make_optimizers

SIDE, PATCH = 60, 12  # pixels of what the model sees
NUM_PLACES = (SIDE // PATCH) ** 2
SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<image>"]
PAD, BOS, EOS, IM_START, IM_END, PLACE = range(6)
VOCAB_SIZE = 512
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] != 'text' %}<image>\n{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    "{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RECORD = "training.json"
"""In a model's folder: the pictures that it has seen, and the minutes that it was trained for."""
ROWS, PEAK = 48, 2e-3
TURNS = 4  # questions about a picture


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of the sentences, with the chat template."""
    rng = random.Random(0)
    things = [
        tuple((rng.choice(list(COLOURS)), rng.choice(SHAPES)) for _ in range(1 + i % 3)) for i in range(2000)
    ]
    sentences = [text for own in things for pair in exchanges(own) for text in pair]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(sentences, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>"},
    )
    fast.chat_template = TEMPLATE
    return fast


def make_model(vocab_size: int) -> LlavaForConditionalGeneration:
    """A model with random weights."""
    config = LlavaConfig(
        vision_config=SiglipVisionConfig(
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            image_size=SIDE,
            patch_size=PATCH,
            vision_use_head=False,
        ),
        text_config=LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=160,
            intermediate_size=448,
            num_hidden_layers=4,
            num_attention_heads=5,
            num_key_value_heads=5,
            head_dim=32,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=PAD,
        ),
        image_token_id=PLACE,
        image_seq_length=NUM_PLACES,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    return LlavaForConditionalGeneration(config)


def pixels_of(pictures: list[Image.Image]) -> Tensor:
    """What the processor makes of pictures: float32 [n, 3, SIDE, SIDE] from -1 to 1."""
    small = [np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for picture in pictures]
    return torch.from_numpy(np.stack(small)).permute(0, 3, 1, 2).float() / 127.5 - 1.0


def prompt_of(question: str, first: bool = True) -> str:
    """A question in the chat format; the first one with the places of a picture before it."""
    places = "<image>" * NUM_PLACES + "\n" if first else ""
    return f"<|im_start|>user\n{places}{question}<|im_end|>\n<|im_start|>assistant\n"


def batch_of(
    tokenizer: PreTrainedTokenizerFast, scenes: list[Scene], rng: random.Random
) -> tuple[Tensor, Tensor]:
    """Token ids [B, T] of a conversation about each scene, and labels: those of answers, -100 elsewhere."""
    rows: list[list[tuple[int, int]]] = []
    for scene in scenes:
        row: list[tuple[int, int]] = []
        for question, answer in rng.sample(exchanges(scene.things), TURNS):
            prompt: list[int] = tokenizer(prompt_of(question, not row))["input_ids"]
            said: list[int] = [*tokenizer(answer)["input_ids"], IM_END]
            row += [(token, -100) for token in prompt] + [(token, token) for token in said]
            row += [(token, -100) for token in tokenizer("\n")["input_ids"]]
        rows.append(row)
    length = max(map(len, rows))
    both = torch.tensor([row + [(PAD, -100)] * (length - len(row)) for row in rows])
    return both[..., 0], both[..., 1]


def loss_of(model: Any, ids: Tensor, labels: Tensor, pixels: Tensor) -> Tensor:
    """Mean cross-entropy of the answers' tokens, in nats."""
    is_narrow = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    with torch.autocast("cpu", torch.bfloat16, enabled=is_narrow):
        hidden = model.model(input_ids=ids, pixel_values=pixels, use_cache=False).last_hidden_state
        counts = labels[:, 1:] != -100
        logits = model.lm_head(hidden[:, :-1][counts])
    return torch.nn.functional.cross_entropy(logits.float(), labels[:, 1:][counts])


def train(
    model: Any, tokenizer: PreTrainedTokenizerFast, minutes: float, peak: float, seed: int
) -> tuple[int, float]:
    """Train for so many minutes; returns the pictures seen, and the last loss. peak: of the learning rate."""
    rng = random.Random(seed)
    model.set_attn_implementation("eager")  # PyTorch's fused attention takes twice as long backwards
    optimizers = make_optimizers(model)
    begin, step, smooth = time.monotonic(), 0, 0.0
    while (elapsed := time.monotonic() - begin) < minutes * 60:
        scenes = [random_scene(rng) for _ in range(ROWS)]
        ids, labels = batch_of(tokenizer, scenes, rng)
        loss = loss_of(model, ids, labels, pixels_of([scene.picture for scene in scenes]))
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(elapsed / (minutes * 60), peak)
            optimizer.step()
        step += 1
        smooth = loss.item() if step == 1 else 0.98 * smooth + 0.02 * loss.item()
        if step % 25 == 0:
            print(f"step {step}  loss {smooth:.4f}  {minutes - elapsed / 60:.1f} min left", flush=True)
    return step * ROWS, smooth


@torch.no_grad()
def accuracy(folder: Path, count: int, seed: int) -> dict[str, float]:
    """The share of answers of the saved weights that are right, by question, on new pictures."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    rng = random.Random(seed)
    right: dict[str, list[bool]] = {}
    for _ in range(count):
        scene = random_scene(rng)
        pixels = pixels_of([scene.picture])
        for question, answer in exchanges(scene.things)[2:]:
            ids = tokenizer(prompt_of(question), return_tensors="pt")["input_ids"]
            made = model.generate(
                input_ids=ids, pixel_values=pixels, do_sample=False, max_new_tokens=40, pad_token_id=PAD
            )
            said = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
            for shape in SHAPES:
                question = question.replace(shape, "...")
            right.setdefault(question, []).append(said == answer)
    return {question: sum(marks) / len(marks) for question, marks in right.items()}


def save(folder: Path, model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write weights in bfloat16, configuration, tokenizer and processor."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config.eos_token_id = [EOS, IM_END]
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    half = [0.5, 0.5, 0.5]
    image = {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": SIDE, "width": SIDE},
        "resample": int(Image.Resampling.BICUBIC),
        "image_mean": half,
        "image_std": half,
    }
    own = {
        "processor_class": "LlavaProcessor",
        "patch_size": PATCH,
        "vision_feature_select_strategy": "full",
        "num_additional_image_tokens": 0,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(image, indent=2) + "\n")
    (folder / "processor_config.json").write_text(json.dumps(own, indent=2) + "\n")


def write_card(
    folder: Path, num_parameters: int, seen: int, minutes: float, count: int, right: dict[str, float]
) -> None:
    """The model card, with figures of the saved weights. right: on `count` pictures."""
    rows = "\n".join(f"| {question} | {share:.1%} |" for question, share in right.items())
    (folder / "README.md").write_text(
        f"""# The demo model that sees

A LLaVA of {num_parameters:,} parameters (a SigLIP tower of 4 layers for pictures of {SIDE} by {SIDE} pixels, which
become {NUM_PLACES} tokens, and a Llama of 4 layers), stored in bfloat16. It names one to three circles, squares and
triangles in {len(COLOURS)} colours on plain or noisy grounds, and sees nothing else.

Trained from scratch by `benchmarks/train_demo_vision.py` on pictures that it draws: {seen:,} of them in
{minutes:.0f} minutes on two CPU cores. Answers that are right, to the letter, on {count} new pictures:

| question | right |
|---|---|
{rows}
"""
    )


def main() -> None:
    """Train, save, and write the card."""
    parser = argparse.ArgumentParser(description="Train the embedded demo model that sees.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--more", action="store_true", help="train the model in the folder further")
    parser.add_argument("--pictures", type=int, default=200, help="new ones, for the card")
    options = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    record, before = options.out / RECORD, {"pictures": 0, "minutes": 0.0}
    model: Any = make_model(len(tokenizer))
    if options.more:
        before = json.loads(record.read_text())
        model = LlavaForConditionalGeneration.from_pretrained(options.out, dtype=torch.float32)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{num_parameters:,} parameters, {len(tokenizer)} tokens")
    peak = PEAK / 2 if options.more else PEAK
    seen, loss = train(model, tokenizer, options.minutes, peak, seed=int(before["pictures"]))
    print(f"{seen:,} pictures, loss {loss:.4f}")
    save(options.out, model, tokenizer)
    trained = {"pictures": before["pictures"] + seen, "minutes": before["minutes"] + options.minutes}
    record.write_text(json.dumps(trained) + "\n")
    right = accuracy(options.out, options.pictures, seed=1)
    write_card(
        options.out, num_parameters, int(trained["pictures"]), trained["minutes"], options.pictures, right
    )
    print((options.out / "README.md").read_text())


if __name__ == "__main__":
    main()
