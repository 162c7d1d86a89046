"""What a model takes on a GPU, by headers alone: beside the plan of an emulated worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pagewire.ipc.wire.lora import LoRAConfig
from pagewire.ipc.wire.worker_messages import Parallel, WorkerConfig
from pagewire.kernels.cpu.panels import NumberFormat
from pagewire.kernels.cuda.linear import PackedWeightLinear, why_not
from pagewire.kernels.data.integers import Integers, integer_weight
from pagewire.kernels.data.weight import Weight
from pagewire.workers.checkpoint.headers import read_headers
from pagewire.workers.device.gpu_memory import GRAPH_BYTES, RECORDED_TOKENS, GpuMemory
from pagewire.workers.estimate.fit import largest_stage, sizes_of
from pagewire.workers.estimate.gpu_fit import Gpu, GpuFit, gpu_fit, gpu_remedies
from pagewire.workers.estimate.gpu_layout import GPU, GpuLayout, stays_packed
from pagewire.workers.module.transforms import QuantisedEmbedding
from pagewire.workers.run.runner import Runner
from tests.kernels.cuda.emulate.launcher import EmulatedLauncher
from tests.kernels.cuda.emulate.worker import EmulatedCudaDevice
from tests.workers.architectures import DELTA_RULE, RECURRENT, VOCAB_SIZE, Architecture
from tests.workers.driver import load_runner
from tests.workers.huge import write_huge

GIB = 1 << 30
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 96}
SIZES: dict[str, Any] = {"device": "cuda", "block_size": 16, "max_num_seqs": 6, "num_blocks": None}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", {}),
    "tied": ("qwen2", {"tie_word_embeddings": True, "num_hidden_layers": 3}),
    "mixture": ("mixtral", {"num_local_experts": 4}),
    "modules": ("granite", {"attention_multiplier": 0.2, "residual_multiplier": 0.7}),
    "vocabulary": ("llama", {"vocab_size": 32_000}),
    "states": ("qwen3_5_text", DELTA_RULE | {"layer_types": RECURRENT, "linear_num_value_heads": 8}),
}


def fit_of(config: WorkerConfig, gpu: Gpu) -> GpuFit:
    return gpu_fit(sizes_of(read_headers(config.model_path), config, GPU), config, gpu)


def dense_embedding_bytes(runner: Runner) -> int:
    """What more a dense embedding takes than that of the emulated device, which is a CPU's."""
    words = runner.model.model.base.words
    return words.rows.dense().nbytes - words.num_bytes if isinstance(words, QuantisedEmbedding) else 0


@pytest.mark.parametrize(
    ("name", "quantization"),
    [(name, None) for name in MODELS]
    + [(name, q) for name in ("dense", "mixture") for q in ("int4", "int8")],
)
def test_a_worker_shares_out_what_was_expected(
    tmp_path: Path, device: EmulatedCudaDevice, name: str, quantization: str | None
) -> None:
    """To the byte, but for activations, of which the worker measures the peak."""
    architecture, fields = MODELS[name]
    folder = Architecture(architecture, HEADS | fields).write(tmp_path, dtype="bfloat16")
    runner, ready = load_runner(folder, **SIZES, quantization=quantization)
    found, plan = fit_of(runner.config, Gpu(4 * GIB, 0, 4)), device.plan
    assert plan is not None and found.problem is None
    # `A_log` and `dt_bias` are in 16 bits there, here in float32.
    decays = 2 * 8 * 2 if name == "states" else 0
    assert found.memory.weights == plan.weights + dense_embedding_bytes(runner) - decays
    same = ("total", "reserve", "others", "context", "scratch")
    assert [getattr(found.memory, part) for part in same] == [getattr(plan, part) for part in same]
    assert all(part.graphs == graph_bytes(part, runner.config) for part in (found.memory, plan))
    if name != "states":  # whose kernels take some more
        slack = 1.2 if name == "mixture" else 1.15  # experts are reckoned one by one, and run in one call
        assert plan.activations <= found.memory.activations <= slack * plan.activations
    assert found.kv_token_bytes * 16 == ready.bytes_per_block
    if name != "states":
        assert found.kv_tokens == ready.num_blocks * 16
        assert found.requests == {64: 6}


def graph_bytes(memory: GpuMemory, config: WorkerConfig) -> int:
    """Of graphs, and of the longest step that is recorded."""
    widest = config.max_num_batched_tokens
    return GRAPH_BYTES + memory.activations * min(RECORDED_TOKENS, widest) // widest


FORMATS = [
    NumberFormat(bits, group, has_offsets, scale_bytes)
    for bits in (4, 6, 8)
    for group in (None, 16, 32, 128)
    for has_offsets in (False, True)
    for scale_bytes in (2, 4)
]


def weight_of(stored: NumberFormat, num_out: int, num_in: int, dtype: torch.dtype) -> Weight:
    scheme = Integers(stored.bits, stored.group, 2 ** (stored.bits - 1))
    codes = torch.zeros(num_out, num_in // scheme.per_byte, dtype=torch.uint8)
    scale_dtype = torch.float16 if stored.scale_bytes == 2 else torch.float32
    scales = torch.ones(num_out, num_in // (stored.group or num_in), dtype=scale_dtype)
    return integer_weight(scheme, codes, scales, scales if stored.has_offsets else None, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("stored", "num_in"),
    [(stored, num_in) for stored in FORMATS for num_in in (128, 144) if num_in % (stored.group or 1) == 0],
)
def test_what_stays_packed_is_what_has_a_kernel(stored: NumberFormat, num_in: int, dtype: str) -> None:
    """And takes the bytes that it was said to take."""
    weight = weight_of(stored, 40, num_in, getattr(torch, dtype))
    has_kernel = why_not(weight) is None
    assert stays_packed(stored, num_in, dtype) == has_kernel
    held = GpuLayout(dtype).held(stored, num_in)
    assert held.is_float != has_kernel
    if has_kernel:
        packed = PackedWeightLinear(EmulatedLauncher(), weight, None)
        assert GpuLayout(dtype).integer_bytes(40, num_in, stored) == packed.num_bytes


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Architecture("llama", HEADS).write(tmp_path_factory.mktemp("llama"), dtype="bfloat16")


def config(folder: Path, **fields: Any) -> WorkerConfig:
    return WorkerConfig(str(folder), **({"max_model_len": 64, "max_num_seqs": 4} | fields))


def test_requests_of_lengths(tmp_path: Path) -> None:
    """By the blocks that they take, and no more than may run at once."""
    folder = Architecture("llama", HEADS | {"max_position_embeddings": 1 << 14}).write(
        tmp_path, dtype="bfloat16"
    )
    token_bytes = 2 * 2 * 32 * 2
    loaded = config(folder, max_model_len=None, max_num_seqs=100, kv_cache_memory_bytes=20_000 * token_bytes)
    found = fit_of(loaded, Gpu(GIB * 8))
    assert found.kv_tokens == 20_000 and found.requests == {1024: 19, 4096: 4, 16_384: 1}
    assert fit_of(msgspec.structs.replace(loaded, max_num_seqs=3), Gpu(GIB * 8)).requests[1024] == 3


def test_a_byte_less_than_a_request_needs_does_not_fit(llama: Path) -> None:
    loaded = config(llama)
    low, high = 0, 4 * GIB
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fit_of(loaded, Gpu(middle)).problem is None else (middle, high)
    found = fit_of(loaded, Gpu(high))
    assert found.memory.kv_cache >= found.kv_request_bytes == 64 * 256
    assert "a request of max_model_len 64 takes 0.0 MiB" in (fit_of(loaded, Gpu(low)).problem or "")
    least = fit_of(loaded, Gpu(GIB // 2)).problem
    assert least is not None and "more than there is" in least


def test_options_change_what_is_expected(llama: Path) -> None:
    plain = fit_of(config(llama), Gpu(4 * GIB)).memory
    adapters = fit_of(config(llama, lora=LoRAConfig()), Gpu(4 * GIB)).memory
    assert plain.graphs == graph_bytes(plain, config(llama))
    assert adapters.graphs == GRAPH_BYTES + graph_bytes(adapters, config(llama))
    assert fit_of(config(llama, enforce_eager=True), Gpu(4 * GIB)).memory.graphs == 0
    assert fit_of(config(llama, dtype="float32"), Gpu(4 * GIB)).memory.graphs == 0
    half = fit_of(config(llama, kv_cache_dtype="fp8"), Gpu(4 * GIB)).kv_token_bytes
    assert 2 * half == fit_of(config(llama), Gpu(4 * GIB)).kv_token_bytes
    used = fit_of(config(llama), Gpu(4 * GIB, GIB)).memory
    assert used.kv_cache == plain.kv_cache - GIB + plain.reserve
    blocks = fit_of(config(llama, num_blocks=1 << 20), Gpu(4 * GIB))
    assert blocks.problem is not None and "more than there is" in blocks.problem


def test_a_stage_has_its_layers(llama: Path) -> None:
    headers = read_headers(str(llama))
    loaded = largest_stage(headers, config(llama, parallel=Parallel(size=2, stages=2)), GPU)
    part, whole = fit_of(loaded, Gpu(4 * GIB)), fit_of(config(llama), Gpu(4 * GIB))
    assert part.kv_token_bytes * 2 == whole.kv_token_bytes
    assert part.memory.weights < 0.6 * whole.memory.weights and part.memory.graphs == whole.memory.graphs


def test_remedies_fit(tmp_path: Path) -> None:
    """Fewer bits of weights, or more GPUs: of these, as few as do."""
    loaded = config(write_huge(tmp_path))
    headers, gpu = read_headers(loaded.model_path), Gpu(1000 * GIB)
    found = fit_of(loaded, gpu)
    assert found.problem is not None and "more than there is" in found.problem
    options = [remedy.options for remedy in gpu_remedies(headers, loaded, gpu)]
    assert options == ["--quantization int8", "--quantization int4", "--tensor-parallel-size 2"]
    assert str(gpu_remedies(headers, loaded, gpu)[1]).startswith("--quantization int4 (480.01 GiB of weights")


def test_a_tied_output_layer_of_integers_has_its_own(tmp_path: Path) -> None:
    """The embedding is dense then, and the layer has 8 bits."""
    folder = Architecture("qwen2", HEADS | {"tie_word_embeddings": True}).write(tmp_path, dtype="bfloat16")
    parts = {part.part: part for part in sizes_of(read_headers(str(folder)), config(folder), GPU).parts}
    assert (parts["embedding"].packed_bytes, parts["output"].packed_bytes) == (VOCAB_SIZE * 64 * 2, 0)
    narrow = config(folder, quantization="int8")
    parts = {part.part: part for part in sizes_of(read_headers(str(folder)), narrow, GPU).parts}
    rows = -(-VOCAB_SIZE // 32) * 32
    assert (parts["embedding"].packed_bytes, parts["output"].packed_bytes) == (
        VOCAB_SIZE * 64 * 2,
        rows * (64 + 4),
    )
