"""Families whose repositories bring code run without it, and compute what their formulas say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.engine_core.config.config import EngineConfig
from pagewire.ipc.families.registry import foreign_model
from pagewire.ipc.files.model_configs import read_configs
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.kernels.cpu.build import REFERENCE
from pagewire.kernels.cpu.library import expected_isa
from pagewire.workers.checkpoint.headers import read_headers
from pagewire.workers.device.cpu import CpuDevice
from pagewire.workers.errors import LoadError
from pagewire.workers.estimate.figures import footprint
from pagewire.workers.module.configuration import load_config
from pagewire.workers.network.build_module import build_module, quantisation, weight_source
from pagewire.workers.run.expected_road import expected_road
from tests.workers.architectures import SERVED, VOCAB_SIZE
from tests.workers.driver import Driver, load_runner
from tests.workers.families.originals import ORIGINALS, Original
from tests.workers.parallel.threads import Rank, run_ranks
from tests.workers.parity import make_prompts, our_tokens, transformers_tokens
from tests.workers.quantised_models import write_packed

PROMPTS = make_prompts(VOCAB_SIZE, (23, 5, 1))
NUM_TOKENS = 6


def greedy(original: Original, prompt: list[int]) -> list[int]:
    """Tokens by the plain formulas, each from a pass over all before it."""
    tensors, ids = original.tensors(), list(prompt)
    for _ in range(NUM_TOKENS):
        ids.append(int(original.logits(tensors, original.config, torch.tensor(ids))[-1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("original", ORIGINALS, ids=lambda original: original.name)
def test_families(original: Original, tmp_path: Path) -> None:
    folder = original.write(tmp_path)
    config = WorkerConfig(str(folder))
    weights = build_module(config, load_config(config), torch.float32, CpuDevice())
    ids = torch.tensor(PROMPTS[0])
    with torch.inference_mode(), weights.streamed():
        logits = weights.causal(input_ids=ids[None], use_cache=False).logits[0]
    expected = original.logits(original.tensors(), original.config, ids)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3 * float(expected.std()))

    runner, ready = load_runner(folder)
    assert Driver(runner).generate(PROMPTS, NUM_TOKENS) == [greedy(original, prompt) for prompt in PROMPTS]

    # What was expected by the header alone. In another dtype than the file's, all weights are copies.
    sizes = footprint(read_headers(folder), REFERENCE, "bfloat16")
    assert sizes.kv_token_bytes * 2 * runner.config.block_size == ready.bytes_per_block
    assert sizes.weight_bytes * 2 == pytest.approx(ready.weight_bytes, rel=0.02)
    assert sizes.is_stack == runner.model.is_stack == original.stack
    assert expected_road(runner.config) == (runner.model.road, runner.decoding.why_not)


@pytest.mark.parametrize("name", ["baichuan 13B", "jais"])
def test_heads_with_slopes_are_divided_over_ranks(name: str, tmp_path: Path) -> None:
    original = next(original for original in ORIGINALS if original.name == name)
    folder = original.write(tmp_path)
    expected = [greedy(original, prompt) for prompt in PROMPTS]

    def work(rank: Rank) -> list[list[int]]:
        return Driver(load_runner(folder, collective=rank)[0]).generate(PROMPTS, NUM_TOKENS)

    assert run_ranks(2, work) == [expected, expected]


def rewritten(folder: Path, **fields: Any) -> Path:
    """The folder, with these fields in its config.json; None drops one."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    return folder


def test_kimi_is_deepseek_under_another_name(tmp_path: Path) -> None:
    folder = SERVED["deepseek_v3"].write(tmp_path)
    expected = transformers_tokens(folder, PROMPTS)
    assert (
        our_tokens(rewritten(folder, model_type="kimi_k2", auto_map={"AutoConfig": "x.X"}), PROMPTS)
        == expected
    )


QWEN = next(original for original in ORIGINALS if original.name == "qwen")


def test_the_whole_engine_sees_the_configuration_of_the_module(tmp_path: Path) -> None:
    folder = QWEN.write(tmp_path)
    values, _ = read_configs(folder)
    assert (values["model_type"], values["intermediate_size"]) == (
        "qwen2",
        QWEN.config["intermediate_size"] // 2,
    )
    assert values["max_position_embeddings"] == QWEN.config["seq_length"]
    assert "auto_map" not in values
    assert EngineConfig.resolve(EngineArgs(str(folder))).worker_config().model_path == str(folder)
    assert read_headers(folder).config == values


def test_code_that_is_trusted_runs_only_where_the_family_does_not(tmp_path: Path) -> None:
    folder = QWEN.write(tmp_path)
    assert read_configs(folder, trust_remote_code=True) == read_configs(folder)
    load_runner(folder, trust_remote_code=True)
    rewritten(folder, scale_attn_weights=False)
    with pytest.raises(LoadError, match="trust_remote_code runs the repository's own code"):
        load_runner(folder)
    assert read_configs(folder, trust_remote_code=True)[0]["model_type"] == "qwen"
    with pytest.raises(LoadError, match=r"does not appear to have a file named model\.py"):
        load_runner(folder, trust_remote_code=True)
    # Without code to run there is nothing to trust.
    with pytest.raises(ValueError, match="scale_attn_weights"):
        read_configs(rewritten(folder, auto_map=None), trust_remote_code=True)


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("qwen", {"visual": {}}, "Qwen-VL and Qwen-Audio are not served"),
        ("qwen", {"rotary_pct": 0.5}, "rotary_pct 0.5 of its configuration is not served, but 1.0 is"),
        ("qwen", {"intermediate_size": None}, "a Qwen 1 model needs other settings than config.json has"),
        ("qwen", {"num_attention_heads": 10**9}, "1000000000 heads"),
        ("qwen", {"num_attention_heads": 8}, r"c_attn.\w+ of the checkpoint has 192 rows, and by its config"),
        ("xverse", {"num_experts": 8}, "num_experts 8 of its configuration is not served"),
        ("minicpm", {"num_experts": 8}, "num_experts 8 of its configuration is not served"),
        ("chatglm", {"multi_query_attention": None}, "ChatGLM-6B of the first generation"),
        ("chatglm", {"vision_config": {}}, "GLM-4V is not served"),
        ("decilm", {"block_configs": []}, "DeciLM model with block_configs"),
        ("decilm", {"num_key_value_heads_per_layer": [3, 4]}, "3 key heads, and 4 are no multiple"),
        (
            "aquila",
            {"architectures": ["ArcticForCausalLM"]},
            "ArcticForCausalLM is not supported: .*dense MLP",
        ),
        (
            "aquila",
            {"architectures": None, "model_type": "phi3small"},
            "phi3small is not supported: .*blocks",
        ),
    ],
    ids=str,
)
def test_refused(name: str, fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    original = next(original for original in ORIGINALS if original.name == name)
    with pytest.raises(LoadError, match=reason):
        load_runner(rewritten(original.write(tmp_path), **fields))


def test_heads_of_a_repository_are_no_language_model(tmp_path: Path) -> None:
    original = next(original for original in ORIGINALS if original.name == "internlm2")
    folder = rewritten(original.write(tmp_path), architectures=["InternLM2ForRewardModel"])
    assert read_configs(folder)[0]["model_type"] == "internlm2"
    with pytest.raises(LoadError, match="contains custom code"):
        load_runner(folder)


@pytest.mark.parametrize(
    ("fields", "model_type"),
    [
        ({"hidden_size": 4096, "model_max_length": 77}, "llama"),
        ({"hidden_size": 5120, "model_max_length": 77}, "alibi_llama"),
        ({"hidden_size": 5120, "model_max_length": 99, "max_position_embeddings": 77}, "alibi_llama"),
    ],
)
def test_baichuan_has_alibi_by_its_size(fields: dict[str, Any], model_type: str) -> None:
    model = foreign_model({"model_type": "baichuan", **fields}, trust_remote_code=False)
    assert model is not None
    assert (model.config["model_type"], model.config["max_position_embeddings"]) == (model_type, 77)


def test_pickles_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="names of their own: save them as safetensors"):
        load_runner(QWEN.write(tmp_path), load_format="pt")


PACKED = ("_proj.weight", "attn.c_attn.weight", "mlp.w1.weight", "wqkv.weight", "feed_forward.w1.weight")
PACKED += ("W_pack.weight", "query_key_value.weight")


@pytest.mark.parametrize(
    ("name", "method"),
    [("internlm2", "awq"), ("decilm", "awq")]
    + [(name, "gptq") for name in ("qwen", "baichuan 7B", "internlm", "chatglm")],
)
def test_quantised_tensors_are_split_along_their_rows(name: str, method: str, tmp_path: Path) -> None:
    original = next(original for original in ORIGINALS if original.name == name)
    (tmp_path / "dense").mkdir()
    packed, plain = write_packed(original.write(tmp_path / "dense"), tmp_path, packed=PACKED, method=method)
    sources = []
    for folder in (packed, plain):
        config = WorkerConfig(str(folder))
        model = load_config(config)
        form, _ = quantisation(config, model)
        sources.append(weight_source(config, model, form))
    assert set(sources[0].names) == set(sources[1].names)
    for weight in sources[1].names:
        assert torch.equal(sources[0].read(weight), sources[1].read(weight)), weight
        assert sources[0].on_meta(weight).shape == sources[1].read(weight).shape
    runner, _ = load_runner(packed)
    assert [len(tokens) for tokens in Driver(runner).generate(PROMPTS, 2)] == [2] * len(PROMPTS)
    sizes = footprint(read_headers(packed), expected_isa())
    assert sizes.is_stack == runner.model.is_stack
    assert sizes.parameters == footprint(read_headers(plain), expected_isa()).parameters
