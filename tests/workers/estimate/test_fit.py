"""Whether a model fits: what is needed is refused a byte earlier, and what is enough loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagewire.ipc.quantization import ONLINE
from pagewire.ipc.wire.worker_messages import Ready, WorkerConfig
from pagewire.kernels.cpu.library import expected_isa
from pagewire.workers.checkpoint.headers import TensorHeader, read_headers
from pagewire.workers.errors import LoadError, MemoryShortageError
from pagewire.workers.estimate.figures import Footprint, expected_speed, footprint
from pagewire.workers.estimate.fit import Fit, fit, kept_bytes, remedies, sizes_of
from pagewire.workers.estimate.inventory import Part
from pagewire.workers.process import main
from pagewire.workers.weight_cache import folder as weight_folder
from pagewire.workers.weight_cache.key import key_of
from tests.workers.architectures import EXPERTS, GROUPED, LATER_EXPERTS, MLA, Architecture
from tests.workers.driver import load_runner
from tests.workers.huge import write_huge

GIB = 1 << 30
ROOMY = (64 * GIB, 64 * GIB)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Architecture("llama", GROUPED).write(tmp_path_factory.mktemp("llama"))


def config(folder: Path, **fields: Any) -> WorkerConfig:
    sizes: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "num_threads": 1, "device": "cpu"}
    return WorkerConfig(str(folder), **sizes | fields)


def sizes(config: WorkerConfig) -> Footprint:
    return sizes_of(read_headers(config.model_path), config, expected_isa())


def needed(config: WorkerConfig) -> tuple[int, Fit]:
    """The least available memory in which a model fits, and how it does; by bisection."""
    found, low, high = sizes(config), 0, ROOMY[0]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (low, middle) if fit(found, config, *ROOMY[:1], middle).problem is None else (middle, high)
        )
    return high, fit(found, config, ROOMY[0], high)


class Sent:
    """The worker's connection; keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.messages.append(message)

    def wake(self) -> None:
        """Adapters have no messages here."""


def test_just_enough_memory_loads_and_a_byte_less_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = config(folder, kv_cache_memory_bytes=1 << 20)
    enough, expected = needed(loaded)
    monkeypatch.setattr(main, "machine_memory", lambda _: (ROOMY[0], enough - 1))
    connection = Sent()
    with pytest.raises(MemoryShortageError, match=r"does not fit.* of 64\.00 GiB are available"):
        main.start(connection, loaded)  # type: ignore[arg-type]
    assert not connection.messages
    monkeypatch.setattr(main, "machine_memory", lambda _: (ROOMY[0], enough))
    runner = main.start(connection, loaded)  # type: ignore[arg-type]
    ready = connection.messages[-1]
    assert isinstance(ready, Ready) and ready.figures is not None
    assert ready.figures.isa == runner_isa()
    assert ready.figures.is_stack == runner.model.is_stack
    assert ready.num_blocks * ready.bytes_per_block == expected.kv_bytes
    assert ready.figures.kv_token_bytes * 16 == ready.bytes_per_block
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ready), type=Ready) == ready


def runner_isa() -> str:
    from pagewire.kernels.cpu.kernels import load

    kernels = load()
    return "reference" if kernels is None else kernels.isa.name


def test_what_is_available_beside_the_weights_goes_to_the_cache(folder: Path) -> None:
    """As the worker sizes it: no more than the requests need, the share of memory, or the default."""
    loaded = config(folder, max_model_len=None)
    found = sizes(loaded)
    assert fit(found, loaded, *ROOMY).kv_tokens == 4 * 128
    wide = msgspec.structs.replace(loaded, max_num_seqs=1 << 30)
    assert fit(found, wide, *ROOMY).kv_bytes == pytest.approx(4 * GIB, rel=1e-4)
    assert fit(found, wide, 2 * GIB, 2 * GIB).kv_bytes == pytest.approx(
        0.9 * (2 * GIB - fit(found, wide, *ROOMY).base_bytes) - fit(found, wide, *ROOMY).step_bytes, rel=1e-3
    )


@pytest.mark.parametrize("codes", ["int8", "int4"])
@pytest.mark.parametrize("head_dim", [16, 40])
def test_a_token_takes_the_bytes_of_its_codes_and_scales(tmp_path: Path, codes: str, head_dim: int) -> None:
    folder = Architecture("llama", GROUPED | {"head_dim": head_dim}).write(tmp_path)
    expected = sizes(config(folder, kv_cache_dtype=codes)).kv_token_bytes
    runner = load_runner(folder, kv_cache_dtype=codes)[0]
    assert expected * runner.config.block_size == runner.block_bytes


def test_latents_of_4_bits_are_refused_by_their_headers(tmp_path: Path) -> None:
    folder = Architecture("deepseek_v2", MLA | LATER_EXPERTS).write(tmp_path)
    with pytest.raises(LoadError, match="'int4' is not for the latents of deepseek_v2: use 'int8'"):
        sizes(config(folder, kv_cache_dtype="int4"))


def test_remedies_fit_and_are_told(tmp_path: Path) -> None:
    """A long context that the KV cache has no room for."""
    folder = Architecture("llama", GROUPED | {"max_position_embeddings": 1 << 20}).write(tmp_path)
    loaded = config(folder, max_model_len=None, kv_cache_memory_bytes=10 << 20)
    found = remedies(read_headers(folder), loaded, "avx512", *ROOMY)
    # A token takes 512 bytes of a model in float32.
    assert [remedy.options for remedy in found if "quantization" not in remedy.options][:2] == [
        "--max-model-len 20480",
        f"--kv-cache-memory-bytes {1 << 29}",
    ]
    assert "20,480 tokens of KV cache" in str(found[0])


def test_a_huge_model_is_refused_and_nothing_helps(tmp_path: Path) -> None:
    loaded = config(write_huge(tmp_path))
    with pytest.raises(MemoryShortageError, match="its weights take 1536") as refusal:
        main.expected_sizes(loaded)
    assert "Free memory, or take a smaller model." in str(refusal.value)


@pytest.mark.parametrize("fields", [{"device": "cuda"}, {"load_format": "dummy"}])
def test_what_is_not_packed_from_a_checkpoint_is_not_expected(tmp_path: Path, fields: dict[str, Any]) -> None:
    loaded = msgspec.structs.replace(config(write_huge(tmp_path)), **fields)
    assert main.expected_sizes(loaded) is None


def test_headers_that_cannot_be_read_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    folder = write_huge(tmp_path)
    with pytest.raises(LoadError, match="cannot load /nowhere"):
        main.expected_sizes(msgspec.structs.replace(config(folder), model_path="/nowhere"))


def test_kept_weights_take_their_file_and_no_loading(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_folder, "cache_root", lambda: tmp_path)
    loaded = config(folder, weight_cache=True)
    assert kept_bytes(loaded, "avx2") is None
    key = key_of(loaded, "avx2")
    assert key is not None
    with weight_folder.new_file(key, 1000) as file:
        assert file is not None
        file.write(bytes(1000))
    first, second = (fit(sizes(loaded), loaded, *ROOMY, kept) for kept in (None, kept_bytes(loaded, "avx2")))
    assert (first.is_kept, second.is_kept) == (False, True)
    assert (second.weight_bytes, second.table_bytes, second.loading_bytes) == (1000, 0, 0)
    assert second.base_bytes < first.base_bytes and second.kv_bytes == first.kv_bytes
    assert kept_bytes(loaded, "avx512") is None
    assert kept_bytes(msgspec.structs.replace(loaded, weight_cache=False), "avx2") is None


def test_a_token_reads_the_experts_that_it_is_sent_to(tmp_path: Path) -> None:
    folder = Architecture("qwen3_moe", GROUPED | EXPERTS).write(tmp_path)
    parts = {part.part: part for part in footprint(read_headers(folder), "avx512").parts}
    experts = parts[Part.EXPERTS.value]
    assert experts.read_bytes == experts.packed_bytes // 2  # 2 of 4
    assert parts[Part.EMBEDDING.value].read_bytes == parts[Part.EMBEDDING.value].packed_bytes == 0


@pytest.mark.parametrize(
    ("quantization", "share"), [(None, 2.0), ("int8", 1.06), ("int4", 0.62), ("experts_int8", 2.0)]
)
def test_quantising_while_loading_changes_the_bytes_of_layers(
    tmp_path: Path, quantization: str | None, share: float
) -> None:
    found = footprint(read_headers(write_huge(tmp_path)), "avx512", quantization=quantization)
    layers = next(part for part in found.parts if part.part == Part.FEED_FORWARD.value)
    assert layers.packed_bytes == pytest.approx(share * layers.parameters, rel=0.02)
    assert layers.file_bytes == 2 * layers.parameters
    slow, fast = (expected_speed(found, rate).token_seconds for rate in (1e9, 2e9))
    assert slow == pytest.approx(2 * fast, rel=0.01)


@pytest.mark.parametrize("quantization", ONLINE)
def test_quantised_while_loading_a_model_takes_what_was_expected(tmp_path: Path, quantization: str) -> None:
    whole_panels = {"num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 128, "vocab_size": 128}
    folder = Architecture("llama", whole_panels).write(tmp_path)
    runner, _ = load_runner(folder, quantization=quantization, dtype="bfloat16")
    found = footprint(read_headers(folder), expected_isa(), "bfloat16", quantization)
    assert runner.model.weight_bytes == pytest.approx(found.weight_bytes, rel=0.02)


def test_an_embedding_of_another_dtype_is_a_copy() -> None:
    class Headers:
        foreign = None
        form, num_files, config = (
            "safetensors",
            1,
            {"hidden_size": 64, "vocab_size": 100, "dtype": "bfloat16"},
        )
        tensors = (TensorHeader("model.embed_tokens.weight", (100, 64), "BF16", 12800),)

    mapped, copied = (footprint(Headers(), "avx512", dtype) for dtype in ("auto", "half"))
    assert (mapped.weight_bytes, copied.weight_bytes) == (128 * 64 * 2, 128 * 64 * 2 + 12800)
    assert mapped.parameters == 6400 and mapped.read_bytes == copied.read_bytes == 128 * 64 * 2
