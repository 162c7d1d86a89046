"""Options that are chosen so that a model fits: shapes of models by sizes of memory, from headers alone."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.checkpoint.headers import Headers, TensorHeader
from pagewire.workers.estimate.figures import Footprint
from pagewire.workers.estimate.fit import fit, sizes_of
from pagewire.workers.estimate.fitted import ENOUGH_TOKENS, LEAST_TOKENS, ROUND_TOKENS, Fitted, fitted

GIB = 1 << 30
MEMORIES = (1 * GIB, 4 * GIB, 16 * GIB, 64 * GIB)
# Layers, hidden size, heads, heads of keys and values, size of the MLP, vocabulary, positions, dtype.
SHAPES = {
    "llama-1B": (16, 2048, 32, 8, 8192, 128256, 131072, "BF16"),
    "llama-3B": (28, 3072, 24, 8, 8192, 128256, 131072, "BF16"),
    "llama-8B": (32, 4096, 32, 8, 14336, 128256, 131072, "BF16"),
    "llama-70B": (80, 8192, 64, 8, 28672, 128256, 131072, "BF16"),
    "llama-2-7B": (32, 4096, 32, 32, 11008, 32000, 4096, "F16"),
    "llama-2-13B": (40, 5120, 40, 40, 13824, 32000, 4096, "F16"),
    "smol-135M": (30, 576, 9, 3, 1536, 49152, 2048, "BF16"),
    "smol-360M": (32, 960, 15, 5, 2560, 49152, 8192, "F32"),
    "tiny-1.1B": (22, 2048, 32, 4, 5632, 32000, 2048, "F32"),
    "mistral-7B": (32, 4096, 32, 8, 14336, 32768, 32768, "BF16"),
    "wide-4B": (36, 2560, 32, 8, 9728, 151936, 262144, "BF16"),
    "demo": (4, 256, 4, 2, 704, 4096, 1024, "BF16"),
}


def headers_of(shape: tuple[Any, ...]) -> Headers:
    """The headers of a Llama."""
    layers, hidden, heads, kv_heads, inner, vocab, positions, dtype = shape
    size = hidden // heads
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "torch_dtype": {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[dtype],
    }
    tensors = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    tensors["model.norm.weight"] = (hidden,)  # type: ignore[assignment]
    for layer in range(layers):
        rows = {"q": heads * size, "k": kv_heads * size, "v": kv_heads * size}
        names: dict[str, tuple[int, ...]] = {
            f"self_attn.{kind}_proj": (count, hidden) for kind, count in rows.items()
        }
        names["self_attn.o_proj"] = (hidden, heads * size)
        names |= {f"mlp.{kind}_proj": (inner, hidden) for kind in ("gate", "up")}
        names["mlp.down_proj"] = (hidden, inner)
        names |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        tensors |= {f"model.layers.{layer}.{name}.weight": given for name, given in names.items()}  # type: ignore[misc]
    item = 4 if dtype == "F32" else 2
    listed = []
    for name, given in tensors.items():
        count = 1
        for number in given:
            count *= number
        listed.append(TensorHeader(name, tuple(given), dtype, count * item))
    return Headers(config, listed, 1, "safetensors")


def config(**fields: Any) -> WorkerConfig:
    return WorkerConfig("nowhere", num_threads=1, device="cpu", max_num_seqs=8, **fields)


def chosen(shape: str, memory: int, **given: Any) -> tuple[Fitted, WorkerConfig]:
    headers, wanted = headers_of(SHAPES[shape]), config(**given)

    def measure(changed: WorkerConfig) -> Footprint:
        return sizes_of(headers, changed, "avx512")

    return fitted(measure, wanted, given.keys(), memory), wanted


@pytest.mark.parametrize(("shape", "memory"), [*itertools.product(SHAPES, MEMORIES)])
def test_what_is_chosen_fits_and_more_would_not(shape: str, memory: int) -> None:
    (changes, found), wanted = chosen(shape, memory)
    headers, positions = headers_of(SHAPES[shape]), SHAPES[shape][6]

    def problem(**fields: Any) -> str | None:
        changed = msgspec.structs.replace(wanted, **fields)
        return fit(sizes_of(headers, changed, "avx512"), changed, memory, memory).problem

    if found.problem is not None:
        least = min(LEAST_TOKENS, positions)
        assert not changes and problem(quantization="int4", max_model_len=least) is not None
        return
    assert problem(**changes) is None and found.resident_bytes + found.step_bytes <= memory
    options = {name: value for name, value in changes.items() if name != "kv_cache_memory_bytes"}
    tokens = options.get("max_model_len", positions)
    assert changes["kv_cache_memory_bytes"] == found.kv_bytes and LEAST_TOKENS <= tokens <= positions
    if tokens < positions:
        assert problem(**{**options, "max_model_len": tokens + ROUND_TOKENS}) is not None
    more = {"int8": [None], "int4": [None, "int8"]}.get(options.get("quantization", ""), [])
    for quantization in more:  # as exact, and at least as long as is enough
        assert problem(quantization=quantization, max_model_len=min(ENOUGH_TOKENS, positions)) is not None


@pytest.mark.parametrize("shape", SHAPES)
def test_more_memory_is_never_worse(shape: str) -> None:
    exact = {"int4": 0, "int8": 1, None: 2}
    before = (-1, 0)
    for memory in range(GIB // 2, 40 * GIB, GIB):
        (changes, found), _ = chosen(shape, memory)
        if found.problem is None:
            tokens = min(ENOUGH_TOKENS, changes.get("max_model_len", SHAPES[shape][6]))
            now = (tokens, exact[changes.get("quantization")])
            assert now >= before
            before = now


@pytest.mark.parametrize(("shape", "memory"), [*itertools.product(SHAPES, MEMORIES)])
def test_what_the_user_gave_stays(shape: str, memory: int) -> None:
    tokens = min(2048, SHAPES[shape][6])
    for given in (
        {"quantization": "int8"},
        {"max_model_len": tokens},
        {"kv_cache_memory_bytes": 1 << 30},
        {"quantization": "int8", "max_model_len": tokens, "kv_cache_memory_bytes": 1 << 30},
    ):
        (changes, found), _ = chosen(shape, memory, **given)
        assert not changes.keys() & given.keys()
        assert found.problem is not None or found.max_model_len == given.get(
            "max_model_len", found.max_model_len
        )


def test_it_is_said_in_a_line() -> None:
    said, _ = chosen("llama-8B", 12 * GIB)
    assert str(said).startswith("quantization int8, max_model_len ") and str(said).endswith("GiB")
    assert "\n" not in str(said) and str(chosen("demo", 64 * GIB)[0]).startswith("as it is: ")
