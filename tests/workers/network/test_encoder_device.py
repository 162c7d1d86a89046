"""An encoder's step has all its tensors on the step's device: here PyTorch's "meta", which has no numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewire.kernels.data.layer import Angles
from pagewire.kernels.data.paging import AttentionBatch, Cache
from pagewire.kernels.reference.kernels import Kernels
from pagewire.workers.caches.kv import in_pages
from pagewire.workers.module.transforms import tabulate_rotary
from pagewire.workers.module.weights import Weights
from pagewire.workers.network.build import build_network
from pagewire.workers.network.model import Model
from pagewire.workers.network.pooler import normalized_rows
from pagewire.workers.step.context import StepContext
from tests.workers.pooled import ENCODERS

META = torch.device("meta")
LENGTHS = [20, 1, 33]


class MetaKernels(Kernels):
    """The reference's kernels; those that read numbers only note where what they get is."""

    def __init__(self) -> None:
        self.devices: set[str] = set()
        self.num_attended = 0

    def note(self, *values: object) -> None:
        self.devices |= {value.device.type for value in values if isinstance(value, Tensor)}

    def store_kv(self, k: Tensor, v: Tensor, cache: Cache, slot_mapping: Tensor) -> None:
        self.note(k, v, cache.k, cache.v, slot_mapping)

    def rotate_and_store(
        self, q: Tensor, k: Tensor, v: Tensor, angles: Angles | None, norms: None, cache: Cache, slots: Tensor
    ) -> Tensor:
        self.note(q, *(angles or ()))
        self.store_kv(k, v, cache, slots)
        return q

    def paged_attention(
        self, q: Tensor, cache: Cache, batch: AttentionBatch, scale: float, terms: Any = None, out: Any = None
    ) -> Tensor:
        places = (batch.query_start_loc, batch.seq_lens, batch.block_table, batch.slot_mapping)
        self.note(q, cache.k, cache.v, *places, terms.relative_bias)
        self.num_attended += 1
        return torch.empty_like(q)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> MetaKernels:
    """Kernels that take tensors without numbers."""
    made = MetaKernels()
    for module in ("dispatch", "linear", "stack"):
        monkeypatch.setattr(f"pagewire.kernels.{module}.implementation_for", lambda *_: made)
    return made


def whole_prompts() -> tuple[AttentionBatch, Tensor, list[int]]:
    """A batch on the host, positions, and where prompts start."""
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    none = torch.zeros(0, dtype=torch.int32)
    batch = AttentionBatch(starts.int(), none, none, none, max(LENGTHS), max(LENGTHS))
    return batch, torch.cat([torch.arange(n) for n in LENGTHS]), starts[:-1].tolist()


@pytest.mark.parametrize("model_type", ["bert", "roberta", "nomic_bert", "modernbert", "mpnet"])
@torch.inference_mode()
def test_a_step_stays_on_its_device(model_type: str, kernels: MetaKernels) -> None:
    """Weights, tables of angles and biases, token types, pages."""
    from transformers import AutoConfig, AutoModel

    base = AutoModel.from_config(AutoConfig.for_model(model_type, **ENCODERS[model_type])).eval()
    base.pooler = None
    tabulate_rotary(base, 128)
    network = build_network(base, Weights(base), META, encodes=True)
    assert network is not None
    model = Model(network, None, encodes=True)
    batch, positions, starts = whole_prompts()
    paged = in_pages(batch, positions)
    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
    paged = replace(paged, **{name: getattr(paged, name).to(META) for name in names})
    ids = torch.zeros(sum(LENGTHS), dtype=torch.int64, device=META)
    for types in (None, torch.zeros_like(ids)):
        step = StepContext(paged, positions.to(META), starts=starts, token_types=types)
        assert model.hidden_states(ids, step).device == META
        assert step.lengths == LENGTHS and step._num_pages == 2 + 1 + 3
    assert kernels.devices == {"meta"} and kernels.num_attended == 2 * len(network.stack.layers)


def test_prompts_lie_in_pages_one_behind_the_other() -> None:
    batch, positions, _ = whole_prompts()
    paged = in_pages(batch, positions)
    assert paged.seq_lens.tolist() == LENGTHS and paged.max_seq_len == paged.max_query_len == 33
    assert paged.block_table.tolist() == [[0, 1, 2], [2, 3, 4], [3, 4, 5]]
    assert paged.slot_mapping.tolist() == [*range(20), 32, *range(48, 81)]


@torch.inference_mode()
def test_embeddings_are_normalized_on_their_device(kernels: MetaKernels) -> None:
    assert normalized_rows(torch.empty(3, 8, device=META)).device == META
