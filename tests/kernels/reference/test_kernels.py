"""The PyTorch reference against PyTorch's own dense attention and the Hugging Face modules."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

from pagewire.kernels.data.layer import Activation
from pagewire.kernels.data.paging import WHOLE, Cache, LogitTerms
from pagewire.kernels.data.weight import dense_weight
from pagewire.kernels.reference.attention import attend_at_once
from pagewire.kernels.reference.kernels import reference
from tests.kernels.batches import TOLERANCE, Request, Shape, page, random_request


def dense(
    request: Request, scale: float, window: int | None = None, chunk: int | None = None
) -> torch.Tensor:
    """The whole sequence through `scaled_dot_product_attention`, [L, Hq, Dv]."""
    length = len(request.q)
    position = torch.arange(length)
    visible = position <= position[:, None]
    if window is not None:
        visible &= position > position[:, None] - window
    if chunk is not None:
        visible &= position // chunk == position[:, None] // chunk
    q, k, v = (x.transpose(0, 1)[None] for x in (request.q, request.k, request.v))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sight", [{}, {"window": 1}, {"window": 7}, {"chunk": 7}], ids=str)
def test_equals_dense_attention(dtype: torch.dtype, sight: dict[str, int]) -> None:
    shape = Shape(num_heads=6, num_kv_heads=2, head_dim=24, v_head_dim=40, block_size=8)
    requests = [random_request(shape, 50, dtype, seed) for seed in range(4)]
    spans = [(0, 50), (49, 50), (7, 7), (13, 29)]
    paged = page(shape, requests, spans, padding=2)
    out = reference.paged_attention(paged.q, paged.plain, paged.batch, 0.2, LogitTerms(**sight))
    expected = [dense(r, 0.2, **sight)[begin:end] for r, (begin, end) in zip(requests, spans, strict=True)]
    torch.testing.assert_close(out[:-2], torch.cat(expected), atol=TOLERANCE[dtype], rtol=0)
    assert not out[-2:].any()


@pytest.mark.parametrize(
    "options", [{}, {"window": 9}, {"softcap": 2.0}, {"sinks": 1}, {"alibi": 1}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_has_the_same_bits_in_any_chunk_and_company(
    dtype: torch.dtype, options: dict[str, float]
) -> None:
    shape = Shape(num_heads=6, num_kv_heads=2, head_dim=24, v_head_dim=40, block_size=8)
    per_head = torch.rand(shape.num_heads, generator=torch.Generator().manual_seed(0))
    chosen: Any = {name: per_head if name in ("sinks", "alibi") else value for name, value in options.items()}
    terms = LogitTerms(**chosen)
    requests = [random_request(shape, length, dtype, length) for length in (300, 40)]

    def attend(spans: list[tuple[int, int]]) -> torch.Tensor:
        paged = page(shape, requests, spans)
        return reference.paged_attention(paged.q, paged.plain, paged.batch, 0.2, terms)

    whole = attend([(0, 300), (0, 40)])
    for begin, end in ((0, 7), (7, 100), (100, 101), (255, 257), (250, 300), (299, 300)):
        assert torch.equal(attend([(begin, end), (3, 3)]), whole[begin:end]), (begin, end)
        both = attend([(begin, end), (17, 40)])
        assert torch.equal(both[: end - begin], whole[begin:end])
        assert torch.equal(both[end - begin :], whole[317:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [7, 100, 2816])
def test_a_row_has_the_same_bits_among_any_others(size: int, dtype: torch.dtype) -> None:
    x = torch.randn(40, 2 * size, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = torch.rand(2 * size, generator=torch.Generator().manual_seed(1)).to(dtype)
    functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
        *(partial(reference.activate_and_mul, activation=activation) for activation in Activation),
        lambda rows: reference.rms_norm(rows, weight, 1e-5),
        lambda rows: reference.rms_norm(rows, weight, 1e-5, offset=1.0),
        reference.pack(dense_weight(x), None),
    ]
    for function in functions:
        whole = function(x)
        for begin, end in ((0, 1), (3, 4), (5, 12), (7, 40), (39, 40)):
            assert torch.equal(function(x[begin:end]), whole[begin:end]), (begin, end)


def test_sinks_softcap_and_alibi_by_hand() -> None:
    """One query on three keys, written out."""
    shape = Shape(num_heads=1, num_kv_heads=1, head_dim=2, v_head_dim=1, block_size=2)
    request = random_request(shape, 3, torch.float64, 1)
    paged = page(shape, [request], [(2, 3)])
    terms = LogitTerms(softcap=1.5, sinks=torch.tensor([0.3]), alibi=torch.tensor([0.5]))
    out = reference.paged_attention(paged.q, paged.plain, paged.batch, 2.0, terms)
    logits = 1.5 * torch.tanh(2.0 * request.k[:, 0] @ request.q[2, 0] / 1.5) + 0.5 * torch.tensor([-2, -1, 0])
    weights = logits.exp() / (logits.exp().sum() + torch.tensor(0.3).double().exp())
    torch.testing.assert_close(out[0, 0], weights @ request.v[:, 0], atol=1e-7, rtol=0)


def test_store_kv_skips_padding() -> None:
    cache = Cache(torch.zeros(3, 2, 4, 5), torch.zeros(3, 2, 4, 6))
    k, v = torch.randn(3, 2, 5), torch.randn(3, 2, 6)
    reference.store_kv(k, v, cache, torch.tensor([9, -1, 2]))
    assert torch.equal(cache.k[2, :, 1], k[0]) and torch.equal(cache.v[0, :, 2], v[2])
    assert cache.k.count_nonzero() == 2 * k[0].numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_equal_hugging_face(dtype: torch.dtype) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma")
    torch.manual_seed(0)
    x, weight = torch.randn(5, 64).to(dtype), torch.randn(64).to(dtype)
    for module, offset in ((llama.LlamaRMSNorm(64, eps=1e-5), 0.0), (gemma.GemmaRMSNorm(64, eps=1e-5), 1.0)):
        module.to(dtype).weight.data.copy_(weight)
        assert torch.equal(reference.rms_norm(x, weight, 1e-5, offset=offset), module(x))

    q, k = torch.randn(5, 4, 16).to(dtype), torch.randn(5, 2, 16).to(dtype)
    angles = torch.randn(5, 8).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = llama.apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None]
    )
    reference.rotary(q, k, cos, sin)
    for got, want in zip((q, k), expected, strict=True):
        assert torch.equal(got, want[0].transpose(0, 1))


@pytest.mark.parametrize(
    "options",
    [
        {"future": WHOLE},
        {"future": 4, "window": 5},
        {"future": WHOLE, "relative_bias": True},
        {"future": 3, "alibi": True},
    ],
    ids=str,
)
def test_attention_at_once_equals_attention_by_tiles(options: dict[str, Any]) -> None:
    """What a GPU runs in float32, which has no kernels: of whole prompts, and of the last tokens of one."""
    shape = Shape(num_heads=6, num_kv_heads=6, head_dim=24, v_head_dim=24)
    per_head = torch.linspace(0.01, 0.2, 6)
    tensors = {"alibi": per_head, "relative_bias": torch.randn(6, 512)}
    terms = LogitTerms(**{name: tensors.get(name, value) for name, value in options.items()})
    for length, first in ((300 if terms.relative_bias is None else 200, 0), (40, 33)):
        request = random_request(shape, length, torch.float32, length)
        paged = page(shape, [request], [(first, length)])
        expected = reference.paged_attention(paged.q, paged.plain, paged.batch, 0.2, terms)
        found = attend_at_once(paged.q, request.k.transpose(0, 1), request.v.transpose(0, 1), 0.2, terms)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
