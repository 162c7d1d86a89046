"""How long a model that sees takes to its first token, beside transformers; and what pictures do to other streams.

    python -m benchmarks.vision [--dtype bfloat16] [--threads 2] [--rounds 5] [--layers 27] [--pictures 40]

A LLaVA with random weights: a tower of the shape of SigLIP So400m (27 layers of 1,152; a picture becomes 729
tokens) before a Llama of 135M. Each round asks about another picture of 1,024 x 768, first here, then
transformers (its processor, and `generate` of one token), then here again with the same picture; no rounds: this is
left out. Last, a stream of tokens is timed alone, and beside a request with many pictures, for each of
`--max-step-ms`: a token waits for the step that it is in, and without a limit (0) a step runs a picture as a whole.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from benchmarks.limits import processor
from pagewire import LLM, AsyncLLM, RequestOutputKind, SamplingParams

PLACE, VOCABULARY = 1000, 1024
SIZE = (1024, 768)
DELTA = RequestOutputKind.DELTA


def make(folder: Path, dtype: torch.dtype, layers: int) -> Any:
    """Save a model with random weights, its tokenizer and processor; returns transformers' own."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    config = transformers.LlavaConfig(
        vision_config=transformers.SiglipVisionConfig(
            hidden_size=1152,
            intermediate_size=4304,
            num_hidden_layers=layers,
            num_attention_heads=16,
            image_size=384,
            patch_size=14,
        ),
        text_config=transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=65536,
        ),
        image_token_id=PLACE,
        image_seq_length=729,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration._from_config(config, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY) if i != PLACE} | {"<image>": PLACE}
    plain = Tokenizer(WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = WhitespaceSplit()
    plain.add_special_tokens([AddedToken("<image>", special=True, normalized=False)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain,
        unk_token="w0",
        pad_token="w0",
        extra_special_tokens={"image_token": "<image>"},
    ).save_pretrained(folder)
    image = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 384, "width": 384}}
    own = {
        "processor_class": "LlavaProcessor",
        "patch_size": 14,
        "vision_feature_select_strategy": "full",
        "num_additional_image_tokens": 0,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    (folder / "processor_config.json").write_text(json.dumps(own))
    return model


def picture(rng: np.random.Generator) -> Image.Image:
    """Blocks of colours."""
    blocks = rng.integers(0, 256, (SIZE[1] // 16, SIZE[0] // 16, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize(SIZE)


def first_tokens(llm: LLM, model: Any, folder: Path, rounds: int) -> None:
    """Time the first tokens in turn, and print them. The first round warms both up."""
    reader = transformers.AutoProcessor.from_pretrained(folder)
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    ours, theirs, again, equal = [], [], [], []
    for number in range(rounds + 1):
        text, image = f"w{number + 1} <image> w5 w6 w7", picture(rng)
        prompt: Any = {"prompt": text, "multi_modal_data": {"image": image}}
        times = [time.perf_counter()]
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        times.append(time.perf_counter())
        with torch.inference_mode():
            inputs = reader(text=[text], images=[image], return_tensors="pt")
            inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
            made = model.generate(**inputs, do_sample=False, max_new_tokens=1, pad_token_id=0)
        times.append(time.perf_counter())
        llm.generate(prompt, params, use_tqdm=False)
        times.append(time.perf_counter())
        equal.append(output.outputs[0].token_ids[0] == int(made[0, -1]))
        for kept, seconds in zip((ours, theirs, again), np.diff(times), strict=True):
            kept.append(float(seconds))
    ratios = [other / own for own, other in zip(ours[1:], theirs[1:], strict=True)]
    print(f"first token: {median(ours):.3f} s, transformers {median(theirs):.3f} s")
    print(
        f"transformers takes {statistics.median(ratios):.2f} times as long ({min(ratios):.2f} to {max(ratios):.2f})"
    )
    print(f"the same picture again: {median(again):.4f} s, {median(again) / median(ours):.1%} of the first")
    print(f"equal tokens: {sum(equal)} of {len(equal)}")


def median(times: list[float]) -> float:
    """The median of all but the first."""
    return statistics.median(times[1:])


async def beside_pictures(address: str, count: int, limit: int) -> None:
    """Time the tokens of a stream alone, and beside a request with many pictures. limit: milliseconds of a step."""
    llm = AsyncLLM.attach(address)
    rng = np.random.default_rng(1)
    images = [picture(rng) for _ in range(count)]
    prompt: Any = {"prompt": " ".join(["<image> w2"] * count), "multi_modal_data": {"image": images}}
    alone = await gaps(llm, asyncio.sleep(5.0))
    begin = time.perf_counter()
    beside = await gaps(llm, answer(llm, prompt))
    seconds = time.perf_counter() - begin
    print(f"steps of {limit or 'any number of'} ms:")
    for name, times in (("alone", alone), (f"beside {count} pictures ({seconds:.1f} s)", beside)):
        print(f"a token {name}: {statistics.median(times) * 1e3:.1f} ms, at most {max(times) * 1e3:.1f}")
    llm.shutdown()


async def answer(llm: AsyncLLM, prompt: Any) -> None:
    """Take one token of a prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    async for _ in llm.generate(prompt, params, "pictures"):
        pass


async def gaps(llm: AsyncLLM, work: Coroutine[Any, Any, None]) -> list[float]:
    """Seconds between the tokens of a stream while something else is done."""
    done = asyncio.create_task(work)
    params = SamplingParams(temperature=0.0, max_tokens=100_000, ignore_eos=True, output_kind=DELTA)
    times = []
    async for _ in llm.generate({"prompt": "w9 w8 w7"}, params, f"stream {time.monotonic_ns()}"):
        times.append(time.perf_counter())
        if done.done():
            break
    await done
    return np.diff(times).tolist()


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=27, help="of the tower")
    parser.add_argument("--pictures", type=int, default=40, help="of the request beside the stream")
    parser.add_argument(
        "--max-step-ms", type=int, nargs="+", default=[0, 200], help="limits of steps; 0: none"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    print(processor())
    with tempfile.TemporaryDirectory() as name:
        model = make(Path(name), getattr(torch, options.dtype), options.layers)
        for limit in options.max_step_ms:
            with LLM(
                name,
                dtype=options.dtype,
                max_model_len=32768,
                kv_cache_memory_bytes=2 << 30,
                num_threads=options.threads,
                limit_mm_per_prompt={"image": options.pictures},
                max_step_ms=limit,
            ) as llm:
                if limit == options.max_step_ms[0] and options.rounds:
                    first_tokens(llm, model, Path(name), options.rounds)
                spawned = llm.session._spawned
                assert spawned is not None
                asyncio.run(beside_pictures(spawned.address, options.pictures, limit))


if __name__ == "__main__":
    main()
