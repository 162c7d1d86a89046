"""AutoRound: its settings as those of the layouts that it writes; `test_checkpoints.py` reads whole checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagewire.workers.checkpoint.formats.registry import format_of
from pagewire.workers.errors import LoadError
from tests.workers.checkpoint.formats import rounding
from tests.workers.checkpoint.formats.reading import NAME, assert_exact, matrix, read
from tests.workers.checkpoint.formats.rounding import rounded, rounded_floats

OTHER = "model.layers.0.mlp.down_proj"


def config(**fields: Any) -> dict[str, Any]:
    settings = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": False, "data_type": "int"}
    return settings | {"packing_format": "auto_round:auto_gptq"} | fields


@pytest.mark.parametrize("name", [OTHER, r".*mlp\.down.*"])
def test_layers_have_settings_of_their_own(name: str) -> None:
    dense = "model.layers.0.self_attn.k_proj"
    form = format_of(
        config(extra_config={name: {"bits": 8, "group_size": 32, "sym": True}, dense: {"bits": 16}})
    )
    first, second = rounded(matrix(), 4, 64, symmetric=False), rounded(matrix(), 8, 32)
    assert_exact(read(form, rounding.gptq(first)), first)
    assert_exact(read(form, rounding.gptq(second), OTHER), second)
    with pytest.raises(LoadError, match="k_proj is quantised, although"):
        form.check([f"{dense}.{suffix}" for suffix in rounding.gptq(first)])


def test_floats_of_4_bits() -> None:
    original = rounded_floats(matrix(), 16)
    tensors = {"weight_packed": original.packed(), "weight_scale": original.scales}
    tensors["weight_global_scale"] = 1 / original.factor.reshape(1)
    form = format_of(config(data_type="nv_fp", packing_format="auto_round:llm_compressor", group_size=16))
    assert torch.equal(read(form, tensors).dense(), original.dense())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"packing_format": "auto_round:fake"}, "'auto_round:fake' is not served; auto_gptq, auto_round"),
        ({"bits": 5}, "GPTQ of 5 bits"),
        ({"rotation_config": {"kind": "hadamard"}}, "activations would be rotated"),
        (
            {"packing_format": "auto_round:auto_awq", "extra_config": {NAME: {"bits": 8}}},
            "q_proj.* has another",
        ),
        ({"extra_config": {NAME: 8}}, "extra_config must be an object of objects"),
    ],
)
def test_what_is_not_served_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadError, match=words):
        format_of(config(**fields))
