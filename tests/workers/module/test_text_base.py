"""Language models that take pictures as well, served for text: tokens are those of transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pagewire.kernels.cpu.build import REFERENCE
from pagewire.workers.checkpoint.headers import read_headers
from pagewire.workers.errors import LoadError
from pagewire.workers.estimate.figures import footprint
from pagewire.workers.run.expected_road import expected_road
from tests.workers.driver import Driver, load_runner
from tests.workers.parallel.test_ranks import generate_over_ranks
from tests.workers.parity import NUM_TOKENS, greedy_tokens, make_prompts, our_tokens, transformers_tokens
from tests.workers.quantised_models import write_packed
from tests.workers.shrunk import NUM_TEXT_TOKENS, shrunk
from tests.workers.versions import skip_unless_known

PROMPTS = make_prompts(NUM_TEXT_TOKENS)


def write(model_type: str, folder: Path) -> Path:
    """A tiny random checkpoint of a type, with all that it needs for pictures."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(shrunk(model_type)).float().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("model_type", "is_stack"),
    [("mistral3", True), ("qwen2_5_vl", True), ("qwen3_vl", True)]
    + [("chameleon", False), ("glm4v", True), ("gemma4", True), ("llama4", True), ("qwen3_5", True)]
    + [("minimax_m3_vl", True), ("step3p7", True)],
)
def test_text_is_served(
    model_type: str, is_stack: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing that only pictures need is kept in memory, as the headers foretell."""
    from transformers import AutoModelForImageTextToText

    folder = write(model_type, tmp_path)
    with caplog.at_level(logging.INFO, "pagewire.worker"):
        runner, ready = load_runner(folder)
    assert f"{model_type} is served for text only: pictures" in caplog.text
    assert runner.model.is_stack == is_stack
    expected = transformers_tokens(folder, PROMPTS, make=AutoModelForImageTextToText)
    assert Driver(runner).generate(PROMPTS, NUM_TOKENS) == expected
    sizes = footprint(read_headers(folder), REFERENCE, "bfloat16")
    assert sizes.is_stack == is_stack
    assert expected_road(runner.config) == (runner.model.road, runner.decoding.why_not)
    assert sizes.kv_token_bytes * 2 * runner.config.block_size == ready.bytes_per_block
    assert sizes.weight_bytes * 2 == pytest.approx(ready.weight_bytes, rel=0.02)


def test_layers_that_look_at_pictures_are_passed_by(tmp_path: Path) -> None:
    """Those of Llama 3.2 Vision take no memory, neither for weights nor for keys."""
    from transformers import AutoModelForImageTextToText

    folder = write("mllama", tmp_path)
    runner, ready = load_runner(folder)
    assert [shape.source for shape in runner.model.kv_shapes] == [None, 0, None]
    expected = transformers_tokens(folder, PROMPTS, make=AutoModelForImageTextToText)
    assert Driver(runner).generate(PROMPTS, NUM_TOKENS) == expected
    sizes = footprint(read_headers(folder), REFERENCE, "bfloat16")
    assert sizes.kv_token_bytes * 2 * runner.config.block_size == ready.bytes_per_block
    assert sizes.weight_bytes * 2 == pytest.approx(ready.weight_bytes, rel=0.02)


def test_keys_that_layers_share_with_and_without_an_indexer(tmp_path: Path) -> None:
    """Of Mistral Large 4, some of whose layers read the latents of earlier ones, rotated or not."""
    from transformers import AutoModelForImageTextToText

    skip_unless_known("mistral_large4")
    small = shrunk("mistral_large4")
    values = small.to_dict()
    values["text_config"] |= {
        "num_hidden_layers": 6,
        "index_topk": 6,
        "layer_types": ["indexed_attention"] * 6,
        "mlp_layer_types": ["dense", *["sparse"] * 5],
        "no_rope_layers": [1, 1, 0, 1, 1, 0],
        "kv_source_layers": [0, 0, 2, 3, 3, 2],
        "pad_token_id": None,
        "indexer_types": ["full", "full", "shared", "full", "shared", "full"],
    }
    config = type(small).from_dict(values)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).float().save_pretrained(tmp_path)
    expected = transformers_tokens(tmp_path, PROMPTS, make=AutoModelForImageTextToText)
    assert our_tokens(tmp_path, PROMPTS) == expected


def test_gemma_3n_is_served_without_the_package_for_its_pictures(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = shrunk("gemma3n")
    config.architectures = ["Gemma3nForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    torch.manual_seed(0)
    text = AutoModelForCausalLM.from_config(config.text_config).float().eval()
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in text.state_dict().items()
        if name != "lm_head.weight"
    }
    beside = {
        f"model.{name}.weight": torch.ones(2, 2)
        for name in ("vision_tower.a", "audio_tower.b", "embed_vision.c")
    }
    save_file(tensors | beside, tmp_path / "model.safetensors", {"format": "pt"})
    expected = [greedy_tokens(text, prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert our_tokens(tmp_path, PROMPTS) == expected


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_weights_of_the_text_are_quantised(method: str, tmp_path: Path) -> None:
    """Some tools write how they are into the part of the configuration for text."""
    dense = write("mistral3", tmp_path / "dense")
    names = ("self_attn.q_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight")
    packed, plain = write_packed(dense, tmp_path, packed=names, method=method)
    if method == "gptq":
        values = json.loads((packed / "config.json").read_text())
        values["text_config"]["quantization_config"] = values.pop("quantization_config")
        (packed / "config.json").write_text(json.dumps(values))
    assert our_tokens(packed, PROMPTS) == our_tokens(plain, PROMPTS)
    sizes = footprint(read_headers(packed), REFERENCE, "float32")
    assert sizes.quantization == method
    assert sizes.weight_bytes < footprint(read_headers(plain), REFERENCE, "float32").weight_bytes


def test_text_is_served_over_ranks(tmp_path: Path) -> None:
    folder = write("mistral3", tmp_path)
    expected = Driver(load_runner(folder)[0]).generate(PROMPTS, NUM_TOKENS)
    for result in generate_over_ranks(folder, 2, PROMPTS):
        assert result.tokens == expected


def test_a_type_without_a_language_model_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import ViTConfig

    ViTConfig(architectures=["ViTModel"]).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(bytes([2, 0, 0, 0, 0, 0, 0, 0]) + b"{}")
    with pytest.raises(
        LoadError, match=r"ViTModel is not supported: transformers has no language model .* 'vit'"
    ):
        load_runner(tmp_path, runner="generate")
