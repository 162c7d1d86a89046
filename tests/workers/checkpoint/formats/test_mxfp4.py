"""MXFP4 is held exactly; the numbers are worked out by their definition."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pagewire.workers.checkpoint.formats import mxfp4
from pagewire.workers.checkpoint.formats.format import StackFormat
from pagewire.workers.checkpoint.formats.quantised import QuantisedCheckpoint
from pagewire.workers.checkpoint.formats.registry import format_of
from pagewire.workers.checkpoint.formats.tables import mxfp4_weight
from pagewire.workers.checkpoint.source import Checkpoint
from tests.workers.checkpoint.formats.reading import shape_of


def e2m1(code: int) -> float:
    """A sign, two bits of exponent with a bias of 1, one of fraction; subnormal where the exponent is 0."""
    exponent, fraction = code >> 1 & 3, code & 1
    size = 2.0 ** (exponent - 1) * (1 + fraction / 2) if exponent else fraction / 2
    return -size if code & 8 else size


def test_every_code_and_every_scale_is_exact() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256).repeat(16, 1)  # all pairs of codes
    exponents = torch.arange(256).clamp(max=254).view(16, 16)
    weight = mxfp4_weight(codes, exponents.to(torch.uint8), torch.float32)
    expected = torch.tensor([e2m1(half) for byte in range(256) for half in (byte & 15, byte >> 4)])
    expected = expected * torch.ldexp(torch.ones(exponents.shape), exponents - 127).repeat_interleave(32, 1)
    assert torch.equal(weight.dense(), expected)
    assert weight.parts[0].data_ptr() == codes.data_ptr()


def test_experts_are_stacked() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 20, 4, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 135, (3, 20, 4), generator=generator, dtype=torch.uint8)
    form = mxfp4.of({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    assert isinstance(form, StackFormat) and form.transposed
    tensors = {"_blocks": blocks, "_scales": scales}
    assert shape_of(form, "experts.gate_up_proj", tensors) == (3, 4 * 32, 20)
    table = torch.tensor([e2m1(code) for code in range(16)])
    numbers = torch.stack((table[blocks.long() & 15], table[blocks.long() >> 4]), dim=-1).flatten(3)
    expected = (numbers * torch.exp2(scales.float() - 127)[..., None]).flatten(2)
    experts = [weight.dense() for weight in form.stacked("experts.gate_up_proj", tensors, torch.float32)]
    assert torch.equal(torch.stack(experts), expected)


def test_a_checkpoint_holds_two_stacks_in_a_module(tmp_path: Path) -> None:
    sizes = {"gate_up_proj": (2, 12, 3, 16), "down_proj": (2, 96, 1, 16)}
    tensors = {"experts.gate_up_proj_bias": torch.ones(2, 12), "router.weight": torch.ones(2, 96)}
    for name, size in sizes.items():
        tensors[f"experts.{name}_blocks"] = torch.randint(256, size, dtype=torch.uint8)
        tensors[f"experts.{name}_scales"] = torch.full(size[:3], 128, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    source = QuantisedCheckpoint(Checkpoint(tmp_path), format_of({"quant_method": "mxfp4"}))
    plain = {"experts.gate_up_proj_bias", "router.weight"}
    assert set(source.names) == {"experts.gate_up_proj", "experts.down_proj", *plain}
    assert source.on_meta("experts.gate_up_proj").shape == (2, 96, 12)
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        experts = list(source.stacked(name, torch.float32, transposed=True))
        assert torch.equal(source.read(name), torch.stack([expert.dense().T for expert in experts]))


def test_what_does_not_fit_is_refused() -> None:
    codes, exponents = torch.zeros(2, 32, dtype=torch.uint8), torch.full((2, 2), 127, dtype=torch.uint8)
    for wrong in (exponents.int(), torch.full((2, 2), 255, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="no powers of two"):
            mxfp4_weight(codes, wrong, torch.float32)
    form = mxfp4.of({})
    tensors = {"_blocks": torch.zeros(1, 4, 2, 16, dtype=torch.uint8), "_scales": exponents[None]}
    with pytest.raises(ValueError, match="do not fit"):
        list(form.stacked("experts.down_proj", tensors, torch.float32))
    with pytest.raises(ValueError, match="a stack of experts"):
        form.weight("experts.down_proj", tensors, torch.float32)
