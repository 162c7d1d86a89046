"""LoRA adapters over several ranks, of which each holds its part; PEFT is the oracle, greedily in float32.

`tests/workers/adapters/test_parity.py` has adapters of all kinds over two ranks of a Llama.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.engine_core.workers.group import merged_adapter
from pagewire.ipc.wire.params import SamplingParams
from tests.workers.architectures import SERVED, VOCAB_SIZE, Architecture
from tests.workers.driver import Driver, Request
from tests.workers.parallel.test_sharded_state import save
from tests.workers.parallel.threads import Rank, run_ranks
from tests.workers.parity import NUM_TOKENS, make_prompts, transformers_tokens
from tests.workers.peft_adapters import AdaptedRunner, peft_tokens, write_adapter_of_all
from tests.workers.random_adapters import CONFIG, DOWN, Q, make_tensors, write

UNEVEN = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "hidden_size": 96}
REPEATED = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16}
MODELS = {
    "three KV heads": Architecture("llama", UNEVEN | {"intermediate_size": 72, "attention_bias": True}),
    "one KV head": Architecture("qwen2", REPEATED),
    **{
        name: SERVED[name]
        for name in (
            *("phi3", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "gemma2", "olmo2", "cohere", "persimmon"),
            *("deepseek_v3", "mixtral", "qwen2_moe", "gpt_oss", "stablelm"),
        )
    },
}
PROMPTS = make_prompts(VOCAB_SIZE, (23, 5, 9))


@pytest.mark.every_architecture
@pytest.mark.parametrize("name", MODELS)
def test_every_way_to_divide_a_model(name: str, tmp_path: Path) -> None:
    """Fused and transposed projections, heads that do not divide evenly, and layers that every rank has."""
    model = MODELS[name].write(tmp_path / "model")
    adapter = write_adapter_of_all(model, tmp_path / "adapter")

    def work(rank: Rank) -> list[list[int]]:
        runner = AdaptedRunner(model, collective=rank)
        runner.load_all([adapter])
        return Driver(runner.runner).generate(PROMPTS, NUM_TOKENS, adapters=[1, 0, 1])

    expected = peft_tokens(model, [adapter, None, adapter], PROMPTS)
    assert list(run_ranks(2, work)) == [expected] * 2
    assert expected != transformers_tokens(model, PROMPTS)


def test_a_fused_projection_over_ranks(tmp_path: Path) -> None:
    """Its queries, keys and values are cut each by itself, as are the transposed modules of GPT-2."""
    model = SERVED["gpt2"].write(tmp_path / "model")
    shapes = {
        "transformer.h.0.attn.c_attn": (192, 64),
        "transformer.h.1.attn.c_proj": (64, 64),
        "transformer.h.1.mlp.c_proj": (64, 256),
    }
    adapter = write(tmp_path / "adapter", CONFIG | {"target_modules": list(shapes)}, make_tensors(0, shapes))

    def work(rank: Rank | None) -> list[list[int]]:
        runner = AdaptedRunner(model, collective=rank)
        runner.load_all([adapter])
        return Driver(runner.runner).generate(PROMPTS, NUM_TOKENS, adapters=[1, 0, 1])

    whole = work(None)
    assert list(run_ranks(2, work)) == [whole] * 2
    assert whole != transformers_tokens(model, PROMPTS)


def test_bits_are_the_same_alone_and_among_others(llama: Path, tmp_path: Path) -> None:
    folders = [write(tmp_path / str(i), tensors=make_tensors(i)) for i in range(3)]
    params = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=0)
    prompts = [*PROMPTS, PROMPTS[0]]
    indices = [1, 0, 2, 3]

    def bits(request: Request) -> Any:
        of_prompt = [rows.logprobs.tolist() for rows in request.prompt_logprobs]
        return request.output, request.logprobs, list(chain.from_iterable(of_prompt))

    def work(rank: Rank) -> tuple[list[Any], list[Any]]:
        runner = AdaptedRunner(llama, collective=rank, dtype="bfloat16")
        runner.load_all(folders)
        driver = Driver(runner.runner, budget=9)
        together = [bits(each) for each in driver.run(prompts, 6, params, adapters=indices)]
        alone = []
        for prompt, index in zip(prompts, indices, strict=True):
            (one,) = Driver(runner.runner, budget=32).run([prompt], 6, params, adapters=[index])
            alone.append(bits(one))
        return together, alone

    (together, alone), (other, _) = run_ranks(2, work)
    assert together == alone == other
    assert together[0] != together[3]


def test_what_one_rank_cannot_load_no_rank_has(llama: Path, tmp_path: Path) -> None:
    """The fault lies in the last column of a matrix, which is the second rank's."""
    tensors = make_tensors()
    tensors[f"base_model.model.{DOWN}.lora_A.weight"][0, -1] = torch.nan
    broken, good = write(tmp_path / "broken", tensors=tensors), write(tmp_path / "good")

    def work(rank: Rank) -> Any:
        runner = AdaptedRunner(llama, collective=rank)
        message = runner.load(1, broken)
        adapters = runner.runner.adapters
        assert (adapters.num_bytes == 0) == (rank.rank == 1)
        adapters.drop(1)  # as the core orders where one has failed
        assert adapters.num_bytes == 0
        return message, runner.load(2, good)

    results = run_ranks(2, work)
    refused = merged_adapter([message for message, _ in results])
    assert refused.error == f"{DOWN!r} has numbers that are not finite in torch.float32 (rank 1)"
    loaded = merged_adapter([message for _, message in results])
    assert loaded.error is None and loaded.rank == 4
    # A of the module with divided outputs is on both ranks, B of that with divided inputs; 64 outputs lie together.
    assert loaded.num_bytes == 4 * 4 * (2 * 64 + 2 * 64 + 100 + 2 * 64)


def test_saved_parts_serve_adapters_that_need_no_whole_weights(llama: Path, tmp_path: Path) -> None:
    save(llama, saved := tmp_path / "saved")
    adapter = write(tmp_path / "adapter")
    magnitude = {f"base_model.model.{Q}.lora_magnitude_vector": torch.ones(64)}
    dora = write(tmp_path / "dora", CONFIG | {"use_dora": True}, make_tensors() | magnitude)

    def work(rank: Rank | None) -> tuple[list[list[int]], str | None]:
        form = {"load_format": "auto" if rank is None else "sharded_state"}
        runner = AdaptedRunner(llama if rank is None else saved, collective=rank, **form)
        error = runner.load(1, dora).error
        runner.load_all([adapter])
        return Driver(runner.runner).generate(PROMPTS, NUM_TOKENS, adapters=[1, 0, 1]), error

    expected, error = work(None)
    assert error is None
    for tokens, refused in run_ranks(2, work):
        assert tokens == expected
        assert refused is not None and "load_format='sharded_state' has parts of them" in refused
