"""The trials of a first run: they cover every kernel, pass with right ones, and find faults that are planted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from pagewire.kernels.cuda import latents, linear, sampling, trial, trials
from pagewire.kernels.cuda.kernels import CudaKernels
from pagewire.kernels.cuda.limits import LATENTS
from pagewire.kernels.cuda.variants import Launches, variants_of
from pagewire.kernels.data.weight import UnpackedLinear, dense_weight
from tests.kernels.cuda.emulate import Edit, EmulatedLauncher
from tests.kernels.cuda.emulate.recorder import Recorder

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
CPU = torch.device("cpu")


KINDS = [{}, {"encodes": True}, {"recurrent": True}, {"mixture": True}]
KINDS += [{"packed": False}, {"mixture": True, "packed": False}, {"packed": False, "invariant": True}]


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kernel_has_a_trial(kind: dict[str, bool], capability: tuple[int, int]) -> None:
    for dtype, head_dim in ((BF16, 64), (FP16, 128)):
        launches = Launches(dtype, E4M3, head_dim, **kind, capability=capability)
        launched = {launch.variant for launch in Recorder.of_trials(launches)}
        of_sampling = {sampling.variant(kernel, dtype) for kernel in sampling.SHARED_BYTES}
        assert launched == set(variants_of(launches)) - of_sampling


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)], ids=str)
@pytest.mark.parametrize("size", sorted(LATENTS))
@pytest.mark.parametrize("indexed", [False, True], ids=["all keys", "chosen keys"])
def test_every_kernel_of_latents_has_a_trial(indexed: bool, size: int, capability: tuple[int, int]) -> None:
    launches = Launches(BF16, BF16, size, capability=capability, indexed=indexed)
    launched = {launch.variant for launch in Recorder.of_trials(launches)}
    assert launched == set(variants_of(launches)) - {
        sampling.variant(kernel, BF16) for kernel in sampling.SHARED_BYTES
    }


def find(name: str, cache_dtype: torch.dtype = BF16, encodes: bool = False) -> list[trials.Trial]:
    """The trials whose names begin so; norms of short rows only, as each shape is another kernel."""
    known = trials.trials(Launches(BF16, cache_dtype, 32, encodes, not encodes, not encodes))
    found = [t for t in known if t.name.startswith(name)]
    return found[:1] if " of " in name else found[-2:]


def verdicts(kernels: CudaKernels, chosen: Sequence[trials.Trial]) -> list[str]:
    return [trial.why_wrong(kernels, CPU) for trial in chosen]


FAULTS = {
    "rms_norm of ": (Edit("chunk.cuh", "sum += x.y * x.y;", ""), False),
    "add_rms_norm of ": (Edit("norms.cu", "held[i] = add<T>", "add<T>"), False),
    "silu_and_mul": (Edit("gates.cu", "x / (1.0f + expf(-x))", "x / (1.0f + expf(x))"), False),
    "gelu_and_mul": (Edit("gates.cu", "0.70710678118654752f", "0.70710678118654752f * 1.2f"), False),
    "gelu_tanh_and_mul": (Edit("gates.cu", "0.044715f", "0.4f"), False),
    "store_kv": (Edit("layout.cuh", "row / (8 / p)", "row"), False),
    "rotate_and_store": (Edit("kv.cu", "chunk < half ? -1.0f : 1.0f", "1.0f"), False),
    "decode attention": (Edit("attention.cuh", "u32(position) % u32(a.chunk)", "u32(position)"), False),
    "prefill attention": (Edit("attention.cuh", "(lane >> 3 & 1)", "(lane >> 4 & 1)"), False),
    "delta rule of ": (Edit("states.cu", "* p.beta[at]", ""), False),
    "convolution": (Edit("states.cu", "window[tap + 1]", "window[tap]"), False),
    "adapters": (Edit("lora.cu", "delta.scale * sum", "sum"), False),
    "experts with dense": (Edit("experts.cu", "__fmul_rn(weight, pair.y)", "pair.y"), False),
    "experts with 8-bit floats": (Edit("experts.cu", "choice / p.num_chosen", "choice"), False),
}


@pytest.mark.planted_faults
@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_kernel_is_found_and_replaced(name: str) -> None:
    edit, encodes = FAULTS[name]
    chosen = find(name, E4M3 if name == "store_kv" else BF16, encodes)
    kernels = CudaKernels(EmulatedLauncher(edits=(edit,)), "cpu")
    assert chosen and any("differs from PyTorch by" in reason for reason in verdicts(kernels, chosen))
    kernels.replace(chosen[0].method)
    assert not any(verdicts(kernels, chosen)) and kernels.replaced == {chosen[0].method}


WRONG_PRODUCTS = [
    Edit("linear.cuh", "step >> p.group_shift", "step"),
    Edit("linear.cuh", "== step + 1) totals.take", "== step + 1 && slice % 2) totals.take"),
]
"""A scale of another group; sums in another order, but only in the kernel for many rows."""


@pytest.mark.planted_faults
@pytest.mark.parametrize("edit", WRONG_PRODUCTS, ids=["wrong", "other bits in other batches"])
def test_weights_are_made_dense_if_their_products_are_wrong(edit: Edit) -> None:
    (*_, chosen) = find("products with 8 bits, groups of 64")
    kernels = CudaKernels(EmulatedLauncher(edits=(edit,)), "cpu")
    assert "differs from PyTorch by" in chosen.why_wrong(kernels, CPU)
    kernels.replace(chosen.method)
    assert isinstance(kernels.pack(dense_weight(torch.ones(2, 32).to(BF16))), UnpackedLinear)


@pytest.mark.planted_faults
def test_weights_stay_packed_if_they_are_unpacked_wrongly() -> None:
    known = trials.trials(Launches(BF16, BF16, 32))
    (chosen,) = (
        trial for trial in known if trial.name == "unpacked 4 bits, groups of 64, scales in bfloat16"
    )
    kernels = CudaKernels(EmulatedLauncher(edits=(Edit("linear.cu", "+ 2 * j;", "+ 2 * (j ^ 1);"),)), "cpu")
    assert "differs from PyTorch by" in chosen.why_wrong(kernels, CPU)
    kernels.replace(chosen.method)
    assert linear.UNPACKED not in kernels.preferred and not kernels.replaced


@pytest.mark.planted_faults
@pytest.mark.parametrize("name", ["no groups", "groups of 64"])
def test_wrong_8_bit_floats_are_found(name: str) -> None:
    (chosen,) = find(f"products with 8-bit floats, {name}")
    assert chosen.why_wrong(CudaKernels(EmulatedLauncher(), "cpu"), CPU) == ""
    edit = Edit("linear.cuh", "0x7b80 : 0x5c00", "0x7b00 : 0x5800")  # half of each number
    reason = chosen.why_wrong(CudaKernels(EmulatedLauncher(edits=(edit,)), "cpu"), CPU)
    assert "differs from PyTorch by" in reason


ROUNDED = [
    ("rows as integers", Edit("quantised_rows.cu", "__float2int_rn(x)", "int(x)")),
    ("rows as 8-bit floats", Edit("quantised_rows.cu", "chunk / GROUP_LANES) * p.m", "chunk / GROUP_LANES)")),
    ("products of rows as integers", Edit("linear.cuh", "(p.x_scales)[row]", "(p.x_scales)[0]")),
    (
        "products of rows as 8-bit floats",
        Edit("linear.cuh", "i64(step / ROW_GROUP_STEPS) * p.m + min", "min"),
    ),
    (
        "products of rows as 8-bit floats, groups of 128",
        Edit("linear.cuh", "i & 1 ? both.y", "i & 2 ? both.y"),
    ),
]


@pytest.mark.planted_faults
@pytest.mark.parametrize(("name", "edit"), ROUNDED, ids=[name for name, _ in ROUNDED])
def test_rows_keep_16_bits_if_those_of_8_are_wrong(name: str, edit: Edit) -> None:
    known = trials.trials(Launches(BF16, BF16, 32, capability=(8, 9)))
    (chosen,) = (trial for trial in known if trial.name == name)
    assert chosen.why_wrong(CudaKernels(EmulatedLauncher(capability=(8, 9)), "cpu"), CPU) == ""
    kernels = CudaKernels(EmulatedLauncher(edits=(edit,), capability=(8, 9)), "cpu")
    assert "differs from PyTorch by" in chosen.why_wrong(kernels, CPU)
    kernels.replace(chosen.method)
    assert chosen.why_wrong(kernels, CPU) == "" and not kernels.replaced


@pytest.mark.parametrize("cache_dtype", [BF16, E4M3], ids=str)
def test_replacements_read_and_write_pages(cache_dtype: torch.dtype) -> None:
    """PyTorch goes on with the cache that kernels have filled, and kernels with its."""
    kernels = CudaKernels(EmulatedLauncher(), "cpu")
    for method in ("store_kv", "rotate_and_store", "paged_attention"):
        kernels.replace(method)
    chosen = [t for t in trials.trials(Launches(BF16, cache_dtype, 64)) if t.method in kernels.replaced]
    assert len(chosen) == (4 if cache_dtype == BF16 else 8)
    assert not any(verdicts(kernels, chosen))


def test_replacements_read_and_write_latents() -> None:
    """As a model of latents may find them, beside another one whose kernels are wrong."""
    kernels = CudaKernels(EmulatedLauncher(), "cpu")
    for method in ("store_kv", "paged_attention"):
        kernels.replace(method)
    chosen = [t for t in trials.trials(Launches(BF16, BF16, 288, indexed=True)) if t.method == latents.METHOD]
    assert len(chosen) == 7 and not any(verdicts(kernels, chosen))


@pytest.mark.parametrize(
    ("result", "expected", "at_least"),
    [
        ([[1.0, 2.0]], [[1.0, 2.0]], 0.0),
        ([[1.0] * 99 + [1.5]], [[1.0] * 100], 0.2),  # a single element among many
        ([[1e-30, 0.0]], [[0.0, 0.0]], float("inf")),  # a row that must be zeros
        ([[1.0, float("nan")]], [[1.0, 1.0]], float("inf")),
    ],
)
def test_the_difference_of_results(
    result: list[list[float]], expected: list[list[float]], at_least: float
) -> None:
    difference = trial.difference(torch.tensor(result), torch.tensor(expected))
    assert difference >= at_least and (difference == 0.0) == (at_least == 0.0)
