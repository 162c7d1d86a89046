"""A stack of layers computed by the CUDA kernels, compared with PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pagewire.kernels.cuda import kernels as cuda_kernels
from pagewire.kernels.cuda.compile import runs_on
from pagewire.kernels.cuda.kernels import CudaKernels
from pagewire.kernels.cuda.layout import exchange_chunks
from pagewire.kernels.cuda.variants import Launches, all_variants, variants_of
from pagewire.kernels.data.layer import Activation, Layer, Norm
from pagewire.kernels.data.paging import CAUSAL, AttentionBatch, Cache
from pagewire.kernels.data.weight import Linear, UnpackedLinear, dense_weight
from pagewire.kernels.reference.kernels import Kernels, reference
from pagewire.kernels.stack import Stack
from tests.kernels.batches import allocate_kv
from tests.kernels.cuda.emulate import ORDERS, EmulatedLauncher

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, BLOCKS, BLOCK_SIZE = 64, 4, 2, 32, 80, 8, 16
LENGTHS = [(1, 20), (5, 5), (0, 7), (1, 33)]
"""The number of new tokens and of all tokens of each request."""


def layers(
    generator: torch.Generator, activation: Activation, head_norms: bool, offset: float
) -> list[Layer]:
    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).bfloat16()

    def norm(size: int) -> Norm:
        return Norm(1 - offset + random(size), 1e-5, offset)

    def product(out: int, size: int) -> Linear:
        return UnpackedLinear(functional.linear, dense_weight(random(out, size)), None)

    return [
        Layer(
            qkv=product((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            out=product(HIDDEN, HEADS * HEAD_DIM),
            up=product(2 * INTERMEDIATE, HIDDEN),
            down=product(HIDDEN, INTERMEDIATE),
            head_norms=(norm(HEAD_DIM), norm(HEAD_DIM)) if head_norms else None,
            attention_norm=norm(HIDDEN),
            output_norm=norm(HIDDEN),
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            scale=HEAD_DIM**-0.5,
            terms=CAUSAL,
            activation=activation,
        )
        for _ in range(2)
    ]


def ragged_batch(generator: torch.Generator) -> tuple[AttentionBatch, Tensor]:
    """A batch of all requests with two rows of padding, and the positions of its tokens."""
    blocks, table, slots, positions = torch.randperm(BLOCKS, generator=generator).tolist(), [], [], []
    for new, length in LENGTHS:
        own = [blocks.pop() for _ in range(-(-length // BLOCK_SIZE))]
        table.append(own + [0] * (3 - len(own)))
        for position in range(length - new, length):
            slots.append(own[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
            positions.append(position)
    starts = torch.tensor([0, *(new for new, _ in LENGTHS)]).cumsum(0).int()
    lengths = torch.tensor([length for _, length in LENGTHS], dtype=torch.int32)
    slot_mapping = torch.tensor([*slots, -1, -1])
    batch = AttentionBatch(starts, lengths, torch.tensor(table, dtype=torch.int32), slot_mapping, 5, 33)
    return batch, torch.tensor([*positions, 0, 0])


def run(
    kernels: Kernels,
    stack: Sequence[Layer],
    residual: Tensor,
    batch: AttentionBatch,
    positions: Tensor,
    caches: Sequence[Cache],
) -> Tensor:
    angles = positions[:, None] * 10000 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.cat([angles, angles], 1)
    first_norm = Norm(torch.ones(HIDDEN).bfloat16(), 1e-5, 0.0)
    with pytest.MonkeyPatch.context() as patch:
        for module in ("dispatch", "stack"):
            patch.setattr(f"pagewire.kernels.{module}.implementation_for", lambda *_: kernels)
        tables = [(angles.cos().bfloat16(), angles.sin().bfloat16())]
        return Stack(first_norm, stack)(residual, batch, caches, tables)


@pytest.mark.parametrize("order", ORDERS[::2])
@pytest.mark.parametrize(
    ("activation", "head_norms", "offset"),
    [
        (Activation.SILU, False, 0.0),
        (Activation.SILU, True, 0.0),
        (Activation.GELU_TANH, True, 1.0),
    ],
)
def test_a_stack_equals_the_reference(
    order: tuple[int, int], activation: Activation, head_norms: bool, offset: float
) -> None:
    generator = torch.Generator().manual_seed(7)
    stack = layers(generator, activation, head_norms, offset)
    batch, positions = ragged_batch(generator)
    plain = [allocate_kv(BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM, HEAD_DIM, torch.bfloat16) for _ in stack]
    for x in (x for cache in plain for x in (cache.k, cache.v)):
        x.copy_(torch.randn(x.shape, generator=generator))
    paged = [Cache(exchange_chunks(cache.k), exchange_chunks(cache.v)) for cache in plain]
    residual = torch.randn(len(positions), HIDDEN, generator=generator).bfloat16()
    ours = residual.clone()

    expected = run(reference, stack, residual, batch, positions, plain)
    actual = run(CudaKernels(EmulatedLauncher(order), "cpu"), stack, ours, batch, positions, paged)

    count = int(batch.query_start_loc[-1])
    assert functional.cosine_similarity(actual[:count].float(), expected[:count].float()).min() > 0.999
    torch.testing.assert_close(actual[:count], expected[:count], rtol=0.1, atol=0.06)
    for cache, found in zip(plain, paged, strict=True):
        torch.testing.assert_close(exchange_chunks(found.k), cache.k, rtol=0.1, atol=0.06)
        torch.testing.assert_close(exchange_chunks(found.v), cache.v, rtol=0.1, atol=0.06)


def test_each_kernel_alone_equals_the_reference() -> None:
    ours: Kernels = CudaKernels(EmulatedLauncher(), "cpu")
    x, y, weight = torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16(), torch.rand(64).bfloat16()
    close = {"rtol": 2**-6, "atol": 1e-5}
    torch.testing.assert_close(ours.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), **close)
    torch.testing.assert_close(
        ours.add_rms_norm(x, y.clone(), weight, 1e-6, offset=1.0),
        reference.add_rms_norm(x, y.clone(), weight, 1e-6, offset=1.0),
        **close,
    )
    for activation in Activation:
        found, wanted = (kernels.activate_and_mul(x, activation) for kernels in (ours, reference))
        torch.testing.assert_close(found, wanted, **close)
    product = ours.pack(dense_weight(torch.eye(64).bfloat16()), torch.ones(64).bfloat16())
    assert torch.equal(product(x), x + 1)
    assert torch.equal(ours.largest(x)[1], x.argmax(1))


def test_attention_reads_what_store_kv_wrote() -> None:
    ours, k, v = CudaKernels(EmulatedLauncher(), "cpu"), *(torch.randn(2, 1, 32).half() for _ in range(2))
    cache = allocate_kv(1, 1, 16, 32, 32, torch.float16)
    ours.store_kv(k, v, cache, torch.tensor([0, 1]))
    starts, length = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    batch = AttentionBatch(starts, length, table, torch.tensor([1]), 1, 2)
    q = torch.randn(1, 1, 32).half()
    truth = torch.softmax(q[0].float() @ k[:, 0].float().T, 1) @ v[:, 0].float()
    found = ours.paged_attention(q, cache, batch, 1.0)[0].float()
    torch.testing.assert_close(found, truth, rtol=1e-2, atol=1e-2)


def test_dtypes_with_kernels() -> None:
    half, fp8 = torch.zeros(1).half(), torch.zeros(1).to(torch.float8_e5m2)
    assert cuda_kernels.serves([half, half]) and cuda_kernels.serves([half, fp8, fp8])
    assert not cuda_kernels.serves([half.float()])
    assert not cuda_kernels.serves([half, half.bfloat16()])
    assert not cuda_kernels.serves([fp8])


def test_head_norms_of_two_eps_are_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    (layer, *_), (batch, positions) = layers(generator, Activation.SILU, True, 0.0), ragged_batch(generator)
    assert layer.head_norms is not None
    q_norm, k_norm = layer.head_norms
    layer = dataclasses.replace(layer, head_norms=(q_norm, dataclasses.replace(k_norm, eps=1.0)))
    caches = [allocate_kv(BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM, HEAD_DIM, torch.bfloat16)]
    x = torch.zeros(len(positions), HIDDEN).bfloat16()
    with pytest.raises(ValueError, match="equal eps"):
        run(CudaKernels(EmulatedLauncher(), "cpu"), [layer], x, batch, positions, caches)


def test_rows_without_a_kernel_are_left_to_pytorch() -> None:
    """Of no multiple of 8 elements, or not aligned; norms are not, where bits must not depend on the batch."""
    kernels = CudaKernels(EmulatedLauncher(), "cpu")
    memory, weight = (
        torch.randn(4, 68, generator=torch.Generator().manual_seed(0)).half(),
        torch.ones(60).half(),
    )
    for x in (memory[:, :60], memory[:, 1:61]):
        assert torch.equal(kernels.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
        own, other = memory[:, 4:64].contiguous(), memory[:, 4:64].contiguous()
        found = kernels.add_rms_norm(x, own, weight, 1e-6)
        assert torch.equal(found, reference.add_rms_norm(x, other, weight, 1e-6)) and torch.equal(own, other)
        expected = reference.activate_and_mul(x, Activation.SILU)
        assert torch.equal(kernels.activate_and_mul(x, Activation.SILU), expected)
    kernels.batch_invariant = True
    with pytest.raises(ValueError, match="no kernel for rows of 60"):
        kernels.rms_norm(memory[:, :60], weight, 1e-6)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)], ids=str)
@pytest.mark.parametrize("encodes", [False, True], ids=["generates", "encodes"])
def test_what_is_compiled_ahead_exists(encodes: bool, capability: tuple[int, int]) -> None:
    """Whatever a model may launch is among the variants that tests compile; an encoder's attention is two-sided."""
    arch = f"sm_{capability[0]}{capability[1]}"
    known = set(all_variants())
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for size in (24, 64, 128, 256):
            kinds = (encodes, not encodes, not encodes)
            launches = Launches(dtype, torch.float8_e4m3fn, size, *kinds, capability=capability)
            ahead = [*variants_of(launches), *variants_of(launches._replace(invariant=True))]
            assert set(ahead) <= known and all(runs_on(variant, arch) for variant in ahead)
            attention = [variant.name for variant in ahead if "attention" in variant.name]
            two_sided = [name for name in attention if name.endswith(", true>")]
            assert bool(two_sided) == (encodes and dtype != torch.float32 and size in (64, 128))
