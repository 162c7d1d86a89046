"""Tokens of models with LoRA adapters: PEFT over transformers is the oracle, greedily in float32."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.pooling import PoolingParams
from pagewire.ipc.wire.worker_messages import Parallel
from pagewire.kernels.data.integers import Integers
from pagewire.workers.errors import LoadError
from pagewire.workers.network import build_module as modules
from pagewire.workers.network.network import Network
from tests.workers import pooled
from tests.workers.architectures import GROUPED, SERVED, VOCAB_SIZE, Architecture
from tests.workers.driver import Driver, Request, load_runner
from tests.workers.parallel import pipelined
from tests.workers.parallel.threads import Rank, run_ranks
from tests.workers.parity import NUM_TOKENS, make_prompts, transformers_tokens
from tests.workers.peft_adapters import (
    LIMITS,
    AdaptedRunner,
    peft_logprobs,
    peft_tokens,
    targets_of,
    write_adapter,
)
from tests.workers.quantised_models import PartsFormat, write_quantised
from tests.workers.random_adapters import make_tensors, write

PROMPTS = make_prompts(VOCAB_SIZE, (23, 5, 17, 1, 9, 12, 6, 4))
KINDS: dict[str, dict[str, Any]] = {
    "rank 1": {"r": 1, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]},
    "rank 8": {"r": 8, "lora_alpha": 4, "target_modules": "all-linear", "bias": "all"},
    "rank 64 rslora": {
        "r": 64,
        "lora_alpha": 2,
        "target_modules": r".*\.(k|o|up|down)_proj",
        "use_rslora": True,
    },
    "patterns": {
        "r": 4,
        "target_modules": ["q_proj", "gate_proj", "down_proj"],
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 6},
        "alpha_pattern": {"gate_proj": 20},
        "exclude_modules": ["layers.0.self_attn.q_proj"],
    },
    "dora": {"r": 4, "target_modules": "all-linear", "use_dora": True},
    "whole modules": {
        "r": 2,
        "target_modules": ["k_proj", "down_proj"],
        "layers_to_transform": [1],
        "modules_to_save": ["embed_tokens", "lm_head", "up_proj"],
    },
    "vocabulary": {"r": 3, "target_modules": ["embed_tokens", "lm_head", "k_proj"]},
}
QUANTISED = (Integers(8, None, 128), Integers(4, 32, 8))
LLAMA = Architecture("llama", GROUPED | {"attention_bias": True})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return LLAMA.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(model, folder / name, seed, **fields)
        for seed, (name, fields) in enumerate(KINDS.items())
    ]


@pytest.fixture(scope="module")
def expected(model: Path, adapters: list[Path]) -> list[list[int]]:
    """What PEFT generates for each prompt: the first without an adapter, the others with one each."""
    return peft_tokens(model, [None, *adapters], PROMPTS)


@pytest.fixture(scope="module")
def runner(model: Path, adapters: list[Path]) -> AdaptedRunner:
    runner = AdaptedRunner(model)
    messages = runner.load_all(adapters)
    assert [message.rank for message in messages] == [1, 8, 64, 6, 4, 2, 3]
    assert all(message.num_bytes > 0 and len(message.content) == 32 for message in messages)
    return runner


def test_adapters_of_all_kinds_beside_the_model_in_one_batch(
    model: Path, expected: list[list[int]], runner: AdaptedRunner
) -> None:
    assert runner.runner.model.is_stack
    base: Any = runner.runner.model.model.base
    assert isinstance(base, Network) and base.stack.compiled is not None
    actual = Driver(runner.runner).generate(PROMPTS, NUM_TOKENS, adapters=range(len(PROMPTS)))
    for name, ours, theirs in zip(["none", *KINDS], actual, expected, strict=True):
        assert ours == theirs, name
    plain = transformers_tokens(model, PROMPTS)
    assert [ours == theirs for ours, theirs in zip(actual, plain, strict=True)] == [True] + [False] * 7


def test_two_ranks_hold_their_parts_of_all_kinds(
    model: Path, adapters: list[Path], expected: list[list[int]]
) -> None:
    def work(rank: Rank) -> tuple[list[list[int]], list[int]]:
        own = AdaptedRunner(model, collective=rank)
        sizes = [message.num_bytes for message in own.load_all(adapters)]
        assert own.runner.model.is_stack
        return Driver(own.runner).generate(PROMPTS, NUM_TOKENS, adapters=range(len(PROMPTS))), sizes

    results = run_ranks(2, work)
    for tokens, _ in results:
        assert dict(zip(["none", *KINDS], tokens, strict=True)) == dict(
            zip(["none", *KINDS], expected, strict=True)
        )
    index = list(KINDS).index("whole modules")
    whole_modules = 4 * 64 * (2 * VOCAB_SIZE + 2 * 100)  # bytes: most of that adapter
    assert all(0.4 < sizes[index] / whole_modules < 0.6 for _, sizes in results)


@pytest.mark.parametrize("shards", [1, 2])
def test_each_stage_holds_the_parts_of_its_own_layers(
    model: Path, adapters: list[Path], expected: list[list[int]], runner: AdaptedRunner, shards: int
) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)

    def work(rank: Rank) -> tuple[list[list[int]], list[int]]:
        own = AdaptedRunner(model, collective=rank, parallel=Parallel(rank.rank, rank.size, stages=2))
        sizes = [message.num_bytes for message in own.load_all(adapters)]
        assert own.runner.model.is_stack
        indices = range(len(PROMPTS))
        outputs, _ = pipelined.generate(own.runner, PROMPTS, rank, greedy, adapters=indices)
        return [output.tokens for output in outputs], sizes

    results = run_ranks(2 * shards, work)
    for tokens, _ in results:
        assert dict(zip(["none", *KINDS], tokens, strict=True)) == dict(
            zip(["none", *KINDS], expected, strict=True)
        )
    if shards == 1:
        own, held = runner.runner.adapters, [sum(sizes) for _, sizes in results]
        assert sum(held) == own.num_bytes and min(held) > own.num_bytes / 3


def test_bits_are_the_same_among_32_adapters(model: Path, tmp_path: Path) -> None:
    folders = [write(tmp_path / str(i), tensors=make_tensors(i)) for i in range(32)]
    runner = AdaptedRunner(model, max_num_seqs=32, num_blocks=256)
    runner.load_all(folders)
    prompts = [PROMPTS[i % len(PROMPTS)][:6] for i in range(32)]
    params = SamplingParams(temperature=0.0, logprobs=2)
    together = Driver(runner.runner, 48).run(prompts, 6, params, adapters=range(1, 33))
    assert len({tuple(request.output) for request in together}) > 16
    for i in (0, 5, 31):
        (alone,) = Driver(runner.runner, 48).run(prompts[i : i + 1], 6, params, adapters=[i + 1])
        assert (alone.output, alone.logprobs) == (together[i].output, together[i].logprobs)


def test_bits_are_the_same_alone_and_among_others(runner: AdaptedRunner) -> None:
    params = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=0)

    def bits(request: Request) -> Any:
        of_prompt = [rows.logprobs.tolist() for rows in request.prompt_logprobs]
        return request.output, request.logprobs, list(chain.from_iterable(of_prompt))

    indices = range(len(PROMPTS))
    together = Driver(runner.runner, 64).run(PROMPTS, NUM_TOKENS, params, adapters=indices)
    for prompt, index, request in zip(PROMPTS, indices, together, strict=True):
        (alone,) = Driver(runner.runner, 64).run([prompt], NUM_TOKENS, params, adapters=[index])
        assert bits(alone) == bits(request), index


@pytest.mark.parametrize("scheme", QUANTISED, ids=str)
def test_adapters_over_quantised_weights(
    scheme: Integers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log probabilities are near those of PEFT over the dequantised model, with and without an adapter."""
    monkeypatch.setattr(modules, "format_of", lambda _: PartsFormat())
    shape = GROUPED | {"intermediate_size": 128}
    source = Architecture("llama", shape).write(tmp_path / "source")
    quantised, plain = write_quantised(
        source, tmp_path / "model", lambda module: scheme if module.endswith("_proj") else None
    )
    kinds = ({"target_modules": "all-linear"}, {"target_modules": ["v_proj", "down_proj"], "use_dora": True})
    adapters = [
        write_adapter(plain, tmp_path / f"adapter{i}", i, 0.5, r=8, **kind) for i, kind in enumerate(kinds)
    ]
    runner = AdaptedRunner(quantised, quantization="awq")
    runner.load_all(adapters)
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    prompts = [PROMPTS[0]] * 3
    requests = Driver(runner.runner, 128).run(prompts, 1, params, adapters=[0, 1, 2])
    ours = [request.prompt_logprobs[0].logprobs.tolist() for request in requests]
    theirs = [peft_logprobs(plain, adapter, PROMPTS[0]) for adapter in (None, *adapters)]
    for index in range(3):
        near = torch.tensor(ours[index]) - torch.tensor(theirs[index])
        far = torch.tensor(ours[index]) - torch.tensor(theirs[index - 1])
        assert near.abs().mean() < 0.1 < far.abs().mean(), index


def test_a_merged_adapter_is_the_model(model: Path, adapters: list[Path], tmp_path: Path) -> None:
    """Also where the weights are then quantised, and where the adapter changes more than weights, refused."""
    names = list(KINDS)
    for name in ("dora", "whole modules"):
        folder = adapters[names.index(name)]
        merged, _ = load_runner(model, merged_adapter=str(folder))
        actual = Driver(merged).generate(PROMPTS[:2], NUM_TOKENS)
        assert actual == peft_tokens(model, [folder] * 2, PROMPTS[:2]), name
    with pytest.raises(LoadError, match=r"has bias and .* which cannot be merged"):
        load_runner(model, merged_adapter=str(adapters[names.index("rank 8")]))
    with pytest.raises(LoadError, match=r"cannot merge the adapter .* is no folder"):
        load_runner(model, merged_adapter=str(tmp_path / "none"))
    with pytest.raises(LoadError, match="the weights are random"):
        load_runner(model, merged_adapter=str(adapters[0]), load_format="dummy")
    plain, _ = load_runner(model, quantization="int8")
    merged, _ = load_runner(model, merged_adapter=str(adapters[0]), quantization="int8")
    assert merged.model.weight_bytes == plain.model.weight_bytes
    assert Driver(merged).generate(PROMPTS[:1], 6) != Driver(plain).generate(PROMPTS[:1], 6)


FIRST = ("gpt2", "gemma2", "mixtral", "qwen3_5_text")
OTHERS = (
    "phi3",
    "qwen2",
    "mistral",
    "gpt_neox",
    "persimmon",
    "codegen",
    "opt",
    "qwen3",
    "granite",
    "cohere",
    "olmo2",
    "qwen2_moe",
    "glm4_moe",
    "granitemoeshared",
    "hunyuan_v1_moe",
    "phimoe",
    "stablelm",
    "bamba",
    "lfm2",
    "gemma4_text",
    "afmoe",
    "dbrx",
    "minimax_m3_vl_text",
    "cohere2_moe",
    "cohere_compass_text",
    "axk1",
    "granite_swa",
    "beam",
    "granitemoe_swa",
    "kolibri1",
    "laguna",
    "modernbert-decoder",
)
LEFT_OUT = {"laguna": {"gate_proj", "up_proj", "down_proj"}}
"""Linear layers of which PEFT saves adapters that it does not load, as the files name shared experts otherwise."""
EVERY = [
    *FIRST,
    *(pytest.param(name, marks=pytest.mark.every_architecture) for name in OTHERS if name in SERVED),
]


@pytest.mark.parametrize("name", EVERY)
def test_architectures(name: str, tmp_path: Path) -> None:
    """Inside a compiled stack, and in linear layers of transformers' modules, transposed ones too."""
    model = SERVED[name].write(tmp_path / "model")
    targets = sorted({*targets_of(model)} - LEFT_OUT.get(name, set()))
    adapter = write_adapter(model, tmp_path / "adapter", 1, 1.0, r=4, target_modules=targets)
    runner = AdaptedRunner(model)
    runner.load_all([adapter])
    prompts = PROMPTS[:3]
    actual = Driver(runner.runner).generate(prompts, NUM_TOKENS, adapters=[1, 0, 1])
    assert actual == peft_tokens(model, [adapter, None, adapter], prompts)
    assert actual != transformers_tokens(model, prompts)


def test_experts_beside_a_dense_half(tmp_path: Path) -> None:
    """An adapter of all linear layers, of the router, too: log probabilities, since it changes no greedy token."""
    model = SERVED["gemma4_text with experts"].write(tmp_path / "model")
    adapter = write_adapter(model, tmp_path / "adapter", 1, 1.0, r=4, target_modules=targets_of(model))
    runner = AdaptedRunner(model)
    assert isinstance(runner.runner.model.model.base, Network)
    runner.load_all([adapter])
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    requests = Driver(runner.runner, 128).run(PROMPTS[:1] * 2, 1, params, adapters=[0, 1])
    ours = [torch.tensor(request.prompt_logprobs[0].logprobs.tolist()) for request in requests]
    theirs = [torch.tensor(peft_logprobs(model, folder, PROMPTS[0])) for folder in (None, adapter)]
    for found, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found.flatten(), wanted.flatten(), rtol=0, atol=1e-3)
    assert (ours[0] - ours[1]).abs().max() > 0.05


def test_latent_attention(tmp_path: Path) -> None:
    """Its `kv_b_proj` is two layers here, and adapters change both; a token's bits are the same alone."""
    model = SERVED["youtu"].write(tmp_path / "model")
    kinds: dict[str, dict[str, Any]] = {
        "lora": {"target_modules": ["kv_b_proj", "kv_a_proj_with_mqa", "q_b_proj"]},
        "dora": {"target_modules": ["kv_b_proj", "o_proj"], "use_dora": True},
        "whole": {"target_modules": ["o_proj"], "modules_to_save": ["kv_b_proj"]},
    }
    folders = [
        write_adapter(model, tmp_path / name, seed, 1.5, r=4, **kind)
        for seed, (name, kind) in enumerate(kinds.items())
    ]
    runner = AdaptedRunner(model)
    runner.load_all(folders)
    params = SamplingParams(temperature=0.0, logprobs=2)
    prompts, indices = PROMPTS[:4], [0, 1, 2, 3]
    together = Driver(runner.runner, 16).run(prompts, NUM_TOKENS, params, adapters=indices)
    assert [request.output for request in together] == peft_tokens(model, [None, *folders], prompts)
    plain = transformers_tokens(model, prompts)
    assert [request.output == tokens for request, tokens in zip(together, plain, strict=True)] == [True] + [
        False
    ] * 3
    for prompt, index, request in zip(prompts, indices, together, strict=True):
        (alone,) = Driver(runner.runner, 64).run([prompt], NUM_TOKENS, params, adapters=[index])
        assert (alone.output, alone.logprobs) == (request.output, request.logprobs), index


def test_a_longer_context_than_the_models(tmp_path: Path) -> None:
    """It is refused, and is served where the model is loaded with the options that the refusal names."""
    theta = {"rope_theta": 500.0}
    scaling = {"rope_type": "linear", "factor": 4.0, **theta}
    unscaled = LLAMA.fields | {"rope_parameters": {"rope_type": "default", **theta}}
    plain = Architecture("llama", unscaled).write(tmp_path / "plain")
    longer = Architecture("llama", LLAMA.fields | {"rope_parameters": scaling}).write(tmp_path / "longer")
    adapter = write_adapter(plain, tmp_path / "adapter", 1, 1.0, r=4, target_modules=["q_proj", "v_proj"])
    settings = adapter / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"context_length": 500}))
    error = AdaptedRunner(plain).load(1, adapter).error
    assert error is not None
    overrides = json.loads(error[error.index("{") :])
    assert overrides == {"rope_scaling": scaling, "max_position_embeddings": 512}
    runner = AdaptedRunner(plain, hf_overrides=overrides, max_model_len=512, num_blocks=256)
    runner.load_all([adapter])
    prompts = make_prompts(VOCAB_SIZE, (300, 9))
    expected = peft_tokens(longer, [adapter] * 2, prompts)
    assert Driver(runner.runner, 64).generate(prompts, NUM_TOKENS, adapters=[1, 1]) == expected
    assert expected != peft_tokens(plain, [adapter] * 2, prompts)


def test_transposed_modules_as_a_whole_and_merged(tmp_path: Path) -> None:
    """Of GPT-2; one of them is square, so that its shape does not say how it lies."""
    gpt2 = SERVED["gpt2"].write(tmp_path / "gpt2")
    whole = write_adapter(
        gpt2, tmp_path / "whole", r=2, target_modules=["c_fc"], modules_to_save=["attn.c_proj"]
    )
    runner = AdaptedRunner(gpt2)
    runner.load_all([whole])
    actual = Driver(runner.runner).generate(PROMPTS[:2], NUM_TOKENS, adapters=[1, 1])
    assert actual == peft_tokens(gpt2, [whole] * 2, PROMPTS[:2])
    low_rank = write_adapter(gpt2, tmp_path / "low", r=2, target_modules=["c_attn", "c_proj"])
    merged, _ = load_runner(gpt2, merged_adapter=str(low_rank))
    actual = Driver(merged).generate(PROMPTS[:2], NUM_TOKENS)
    assert actual == peft_tokens(gpt2, [low_rank] * 2, PROMPTS[:2])


def test_an_adapter_brings_tokens_of_its_own(model: Path, adapters: list[Path], tmp_path: Path) -> None:
    """They are in its prompts and its outputs, also over two ranks or stages; rows beside it do not have them."""
    from transformers import AutoModelForCausalLM

    larger = AutoModelForCausalLM.from_pretrained(model)
    larger.resize_token_embeddings(VOCAB_SIZE + 400)
    larger.save_pretrained(tmp_path / "larger")
    whole = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    adapter = write_adapter(tmp_path / "larger", tmp_path / "adapter", 3, **whole)
    prompts = [[*PROMPTS[1], VOCAB_SIZE + 7, 5, VOCAB_SIZE + 399], PROMPTS[0], PROMPTS[2]]
    params = SamplingParams(temperature=0.0, logprobs=2, repetition_penalty=1.0001)

    def loaded(**fields: Any) -> AdaptedRunner:
        runner = AdaptedRunner(model, replace(LIMITS, extra_vocab_size=400), **fields)
        messages = runner.load_all([adapter, adapters[0]])
        assert [message.num_extra_tokens for message in messages] == [400, 0]
        return runner

    def work(rank: Rank | None) -> list[list[int]]:
        runner = loaded(collective=rank).runner
        return Driver(runner).generate(prompts, NUM_TOKENS, params, adapters=[1, 0, 2])

    def stage(rank: Rank) -> list[list[int]]:
        runner = loaded(collective=rank, parallel=Parallel(rank.rank, 2, stages=2)).runner
        until = replace(params, max_tokens=NUM_TOKENS, ignore_eos=True)
        found, _ = pipelined.generate(runner, prompts, rank, until, adapters=[1, 0, 2])
        return [output.tokens for output in found]

    outputs = (ours, *beside) = work(None)
    assert [*run_ranks(2, work), *run_ranks(2, stage)] == [outputs] * 4
    assert [ours] == peft_tokens(tmp_path / "larger", [adapter], prompts[:1])
    assert max(ours) >= VOCAB_SIZE > max(map(max, beside))
    assert beside == peft_tokens(model, [None, adapters[0]], prompts[1:])
    few = AdaptedRunner(model, replace(LIMITS, extra_vocab_size=399)).load(1, adapter)
    assert few.error == "it brings 400 tokens, over lora_extra_vocab_size 399"


@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_models_that_embed(model_type: str, tmp_path: Path) -> None:
    """A decoder stack and an encoder, whose modules have names without the prefix of a causal model."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModel

    folder = pooled.write(tmp_path / "model", model_type)
    if model_type == "bert":
        pooled.sentence_transformer(folder, "mean_tokens")
    torch.manual_seed(1)
    config = LoraConfig(target_modules="all-linear", exclude_modules=["pooler.dense"])
    adapted = get_peft_model(AutoModel.from_pretrained(folder), config)
    with torch.no_grad():
        for parameter in filter(lambda parameter: parameter.requires_grad, adapted.parameters()):
            parameter.add_(torch.randn_like(parameter) * 0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    runner = AdaptedRunner(folder, **({"convert": "embed"} if model_type == "llama" else {}))
    runner.load_all([tmp_path / "adapter"])
    task = PoolingParams(task="embed")
    found = pooled.pool(runner.runner, PROMPTS[:2], task, adapters=[1, 0])
    base = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        plain = base(torch.tensor([PROMPTS[1]]))[0][0]
        ours = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(torch.tensor([PROMPTS[0]]))[0][0]
    for vector, hidden in zip(found, (ours, plain), strict=True):
        expected = hidden[-1] if model_type == "llama" else hidden.mean(0)
        assert pooled.cosine(vector, expected) > 0.99999
