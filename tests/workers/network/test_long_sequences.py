"""Models whose rotary angles depend on the length of a sequence: longrope and dynamic NTK.

The oracle runs transformers' module anew for each token, without a cache: short sequences have the angles of short
ones, and longer ones others, from their first token on. Phi-3's `generate` gives the same, as it drops its cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewire.ipc.wire.pooling import PoolingParams
from pagewire.workers.errors import LoadError
from pagewire.workers.module import transforms
from tests.workers.architectures import GROUPED, MLA, VOCAB_SIZE, Architecture
from tests.workers.driver import Driver, load_runner
from tests.workers.parity import NUM_TOKENS, make_prompts, transformers_tokens
from tests.workers.pooled import cosine, pool
from tests.workers.scheduled import BLOCK_SIZE, MAX_MODEL_LEN, SETTINGS, run
from tests.workers.versions import skip_before

SHORT = 24
PROMPTS = make_prompts(VOCAB_SIZE, (23, 5, 14, 1, 30, 17, 24, 25))  # below, across and above


def longrope(num_angles: int) -> dict[str, Any]:
    """Settings of a rotary embedding with other frequencies for more than `SHORT` tokens."""
    settings = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1 + i / 10 for i in range(num_angles)],
        "long_factor": [2.0 + i for i in range(num_angles)],
        "original_max_position_embeddings": SHORT,
        "factor": 5.0,
    }
    return {"rope_parameters": settings, "original_max_position_embeddings": SHORT, "sliding_window": None}


LONGROPE = {
    "phi3": Architecture("phi3", GROUPED | longrope(8)),
    "llama": Architecture("llama", GROUPED | longrope(8)),
    "minicpm3": Architecture("minicpm3", MLA | longrope(4)),
}
NTK_THETA, NTK_FACTOR = 100.0, 4.0


def ntk(**settings: Any) -> Architecture:
    """A Llama with a rotary embedding of these settings, made for `SHORT` tokens."""
    return Architecture("llama", GROUPED | {"rope_parameters": settings, "max_position_embeddings": SHORT})


def anew(model_of: Callable[[int], Any], prompt: list[int]) -> list[int]:
    """Greedy tokens, each by a model that is chosen by the number of tokens before it."""
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        with torch.inference_mode():
            logits = model_of(len(tokens))(input_ids=torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def check(folder: Path, expected: list[list[int]]) -> None:
    """Compare tokens for every way to schedule, in one batch, twice over."""
    runner, ready = load_runner(folder, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE)
    assert ready.short_length == SHORT
    for setting in SETTINGS:
        outputs, _ = run(runner, setting, PROMPTS)
        assert outputs == expected + expected, setting.name


@pytest.mark.parametrize("name", LONGROPE)
def test_longrope(name: str, tmp_path: Path) -> None:
    folder = LONGROPE[name].write(tmp_path)
    model = loaded(folder)
    expected = [anew(lambda _: model, prompt) for prompt in PROMPTS]
    check(folder, expected)
    if name == "phi3":
        skip_before((5, 20), "generate computes keys anew where angles change")
        assert transformers_tokens(folder, PROMPTS) == expected


def test_dynamic_ntk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long sequences have the frequencies of max_model_len, whatever their own length."""
    monkeypatch.setenv("PAGEWIRE_ALLOW_LONG_MAX_MODEL_LEN", "1")
    growth = NTK_FACTOR * MAX_MODEL_LEN / SHORT - (NTK_FACTOR - 1)
    size = GROUPED["head_dim"]
    theta = NTK_THETA * growth ** (size / (size - 2))
    folder = ntk(rope_type="dynamic", rope_theta=NTK_THETA, factor=NTK_FACTOR).write(tmp_path / "model")
    short = loaded(ntk(rope_type="default", rope_theta=NTK_THETA).write(tmp_path / "short"))
    long = loaded(ntk(rope_type="default", rope_theta=theta).write(tmp_path / "long"))
    check(folder, [anew(lambda length: long if length > SHORT else short, prompt) for prompt in PROMPTS])


def test_prompts_are_pooled_with_the_angles_of_their_lengths(tmp_path: Path) -> None:
    folder = LONGROPE["llama"].write(tmp_path)
    model = loaded(folder)
    runner, _ = load_runner(folder, convert="embed", max_model_len=MAX_MODEL_LEN)
    vectors = pool(runner, PROMPTS, PoolingParams(task="embed"), budget=16)
    for prompt, vector in zip(PROMPTS, vectors, strict=True):
        hidden = model.model(input_ids=torch.tensor([prompt]), use_cache=False).last_hidden_state[0, -1]
        assert cosine(vector, hidden.detach()) > 0.999999


def test_a_model_that_takes_no_more_tokens_has_one_table(tmp_path: Path) -> None:
    folder = LONGROPE["llama"].write(tmp_path)
    runner, ready = load_runner(folder, max_model_len=SHORT, block_size=BLOCK_SIZE)
    assert ready.short_length == 0
    prompts = PROMPTS[1:4]
    assert Driver(runner).generate(prompts, NUM_TOKENS) == transformers_tokens(folder, prompts)


@pytest.mark.parametrize("wrong", ["short", "long"])
def test_both_tables_are_proven(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Angles that are wrong in one of them are noticed by the logits of one request of the dry run."""

    def joined(tables: Any) -> Any:
        parts = list(tables)
        parts[wrong == "long"] = tuple(part.new_ones(part.shape) for part in parts[wrong == "long"])
        return tuple(torch.cat(both, 1) for both in zip(*parts, strict=True))

    monkeypatch.setattr(transforms, "_one_after_the_other", joined)
    with pytest.raises(LoadError, match="its logits with paged attention are wrong"):
        load_runner(LONGROPE["phi3"].write(tmp_path), max_model_len=MAX_MODEL_LEN)


def test_layers_that_change_their_angles_at_several_lengths_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = iter((24, 25))

    class Rotary(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rope_type, self.config, self.original_max_seq_len = "dynamic", None, next(lengths)

        def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
            return x

    Rotary.__name__ = "RotaryEmbedding"
    module = torch.nn.ModuleDict({"one": Rotary(), "two": Rotary()})
    assert transforms.short_length(module, 25) == 24
    with pytest.raises(LoadError, match="its rotary angles change at several lengths: 24, 25"):
        transforms.short_length(module, 26)
