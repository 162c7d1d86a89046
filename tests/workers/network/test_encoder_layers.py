"""Layers of encoders as kernels, beside transformers' modules of the same weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pagewire.workers.module.weights import Weights
from pagewire.workers.network.encoder_layers import compile_layers
from tests.workers.media.checkpoints import MODELS, MediaModel

CPU = torch.device("cpu")
SHAPE = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
WHISPER = {"d_model": 48, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 80}


def clip(**changes: Any) -> Any:
    config = transformers.CLIPVisionConfig(**SHAPE, image_size=28, patch_size=7, **changes)
    return transformers.CLIPVisionModel(config)


def siglip() -> Any:
    return transformers.SiglipVisionModel(
        transformers.SiglipVisionConfig(**SHAPE, image_size=28, patch_size=7)
    )


def whisper() -> Any:
    config = transformers.WhisperConfig(
        **WHISPER, decoder_layers=1, decoder_attention_heads=4, vocab_size=64, pad_token_id=0
    )
    return transformers.WhisperForConditionalGeneration(config)


def bart() -> Any:
    config = transformers.BartConfig(
        **WHISPER, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=80, vocab_size=64
    )
    return transformers.BartForConditionalGeneration(config)


def pair(make: Callable[[], Any], dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The same random model twice."""
    torch.manual_seed(0)
    model = make().to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model, copy.deepcopy(model)


def embeddings_needed(model: Any) -> Any:
    """`Weights` ask a model for the table of its words, which a tower lacks."""
    model.get_input_embeddings = lambda: None
    return model


@pytest.mark.parametrize(
    "make", [clip, siglip, lambda: clip(hidden_act="gelu")], ids=["quick_gelu", "tanh", "gelu"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pictures_of_a_batch(make: Callable[[], Any], dtype: torch.dtype) -> None:
    expected, model = pair(make, dtype)
    layers = compile_layers(embeddings_needed(model), Weights(model), CPU)
    assert len(layers) == SHAPE["num_hidden_layers"]
    assert sum(layer.num_bytes for layer in layers) > 0
    pixels = torch.randn(3, 3, 28, 28).to(dtype)
    with torch.inference_mode():
        ours = model(pixels, output_hidden_states=True)
        theirs = expected(pixels, output_hidden_states=True)
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.1}
    torch.testing.assert_close(ours.last_hidden_state, theirs.last_hidden_state, **close)
    for own, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        torch.testing.assert_close(own, other, **close)


@pytest.mark.parametrize("of_bool", [True, False])
def test_tokens_that_nobody_sees(of_bool: bool) -> None:
    expected, model = pair(siglip)
    compile_layers(embeddings_needed(model), Weights(model), CPU)
    seen = torch.tensor([[1, 1, 1, 0, 0, 1], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    mask = seen[:, None, None].expand(2, 1, 6, 6)
    if not of_bool:
        mask = torch.zeros(2, 1, 6, 6).masked_fill(~mask, torch.finfo(torch.float32).min)
    states = torch.randn(2, 6, SHAPE["hidden_size"])
    ours, theirs = (
        next(part for name, part in whole.named_modules() if name.endswith("layers.1"))
        for whole in (model, expected)
    )
    with torch.inference_mode():
        found = ours(states, attention_mask=mask)
        wanted = theirs(states, attention_mask=mask)
    torch.testing.assert_close(found[seen], wanted[seen], rtol=1e-4, atol=1e-4)
    assert torch.equal(found[~seen], states[~seen])


def test_sound() -> None:
    expected, model = pair(whisper)
    assert len(compile_layers(model.model.encoder, Weights(model), CPU)) == WHISPER["encoder_layers"]
    columns = torch.randn(1, 80, 3000)
    with torch.inference_mode():
        ours = model.model.encoder(columns).last_hidden_state
        theirs = expected.model.encoder(columns).last_hidden_state
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("what", ["norms elsewhere", "another activation", "float16", "a GPU"])
def test_layers_that_stay_modules(what: str) -> None:
    if what == "norms elsewhere":
        model = pair(bart)[1].model.encoder
    else:
        dtype = torch.float16 if what == "float16" else torch.float32
        activation = "mish" if what == "another activation" else "gelu"
        model = pair(lambda: clip(hidden_act=activation), dtype)[1]
    model = embeddings_needed(model)
    device = torch.device("meta") if what == "a GPU" else CPU
    names = set(model.state_dict())
    assert compile_layers(model, Weights(model), device) == []
    assert set(model.state_dict()) == names


KEPT = {"internvl"}
"""InternVL scales what a layer adds."""


@pytest.mark.parametrize("row", MODELS, ids=lambda row: row.name)
def test_towers_that_run_as_kernels(row: MediaModel, tmp_path: Path) -> None:
    model = transformers.AutoModelForImageTextToText.from_pretrained(row.write(tmp_path)).eval()
    wrapper = model.model
    names = ("language_model", "text_model", "layers")
    text = next(name for name in names if hasattr(wrapper, name))
    setattr(wrapper, text, torch.nn.Identity())
    assert bool(compile_layers(wrapper, Weights(embeddings_needed(model)), CPU)) == (row.name not in KEPT)
