"""Proofs at load keep what they compare on one device. A device that computes nothing stands for a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from pagewire.kernels.data.integers import Integers, integer_weight
from pagewire.kernels.data.weight import Weight, dense_weight
from pagewire.workers.module import latent
from pagewire.workers.module.products import check_product

OTHER = torch.device("meta")
"""In this mode, as on a GPU, an operation on tensors of two devices raises."""


def test_a_product_of_weights_that_were_quantised_on_the_device() -> None:
    """Up to where the results are looked at."""

    class Product:
        def __call__(self, x: Tensor) -> Tensor:
            assert x.device == OTHER
            return x.new_zeros(len(x), 64)

    with FakeTensorMode():
        codes = torch.zeros(64, 64, dtype=torch.uint8, device=OTHER)
        scales = torch.ones(64, 4, dtype=torch.float16, device=OTHER)
        weight = integer_weight(Integers(4, 32, 8), codes, scales, None, torch.bfloat16)
        product: Any = Product()
        with pytest.raises(DataDependentOutputException):
            check_product(product, weight, torch.zeros(64, device=OTHER), OTHER)


def test_latents_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels attend to latents of their size. The weight is read on the CPU."""
    monkeypatch.setattr(latent, "implementation_for", lambda _: SimpleNamespace(latents={(288, 256)}))

    class Attention(nn.Module):
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim, kv_lora_rank = 16, 32, 24, 256

        def __init__(self) -> None:
            super().__init__()
            self.kv_b_proj = nn.Linear(256, 4 * 40, bias=False, device=OTHER)

        def expand_kv(self) -> None:
            """What is replaced."""

    class Read:
        def matrix(self, module: nn.Module) -> Weight:
            return dense_weight(torch.zeros(4 * 40, 256))

        def let_go(self) -> None:
            """Nothing to let go."""

    read: Any = Read()
    with FakeTensorMode():
        attention: Any = Attention()
        latent.absorb_latents(nn.ModuleList([attention]), read, OTHER)
        heads = attention.latent_heads
        assert not hasattr(attention, "kv_b_proj") and heads.num_bytes == 4 * 40 * 256 * 4
        queries = heads.queries(torch.zeros(3, 4, 16, device=OTHER))
        assert (queries.shape, queries.device) == ((3, 4, 256), OTHER)
        values = heads.outputs(queries)
        assert (values.shape, values.device) == ((3, 4, 24), OTHER)
        expanded = heads.heads(torch.zeros(3, 256, device=OTHER))
        assert (expanded.shape, expanded.device) == ((3, 160), OTHER)
        other: Any = Attention()
        other.qk_rope_head_dim = 16
        latent.absorb_latents(other, read, OTHER)
        assert hasattr(other, "kv_b_proj")
