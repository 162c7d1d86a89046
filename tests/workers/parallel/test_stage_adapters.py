"""LoRA adapters over the stages of a pipeline: each loads what belongs to its own layers, all refuse the same.

`tests/workers/adapters/test_parity.py` has adapters of all kinds over the stages of a Llama, against PEFT.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from pagewire.engine_core.workers.group import merged_adapter
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import Parallel
from tests.workers.adapters.test_experts import KINDS, separate
from tests.workers.adapters.test_refused import LIMITS, WRONG_TENSORS, changed
from tests.workers.architectures import SERVED, VOCAB_SIZE
from tests.workers.parallel.pipelined import generate
from tests.workers.parallel.threads import Rank, run_ranks
from tests.workers.parity import NUM_TOKENS, make_prompts, transformers_tokens
from tests.workers.peft_adapters import AdaptedRunner, peft_tokens, write_adapter, write_adapter_of_all
from tests.workers.random_adapters import CONFIG, Tensors, make_tensors, write

OTHERS = ("phi3", "gpt_neox", "opt", "gemma2", "cohere", "deepseek_v3", "mixtral", "qwen2_moe", "gpt_oss")
PROMPTS = make_prompts(VOCAB_SIZE, (23, 5, 9))
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def staged(model: Path, rank: Rank, **fields: Any) -> AdaptedRunner:
    """A rank of two stages."""
    return AdaptedRunner(model, collective=rank, parallel=Parallel(rank.rank, rank.size, stages=2), **fields)


def tokens(runner: AdaptedRunner, rank: Rank, adapters: Sequence[int]) -> list[list[int]]:
    """What `PROMPTS` give with these adapters."""
    return [output.tokens for output in generate(runner.runner, PROMPTS, rank, GREEDY, adapters=adapters)[0]]


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.every_architecture) for name in OTHERS)]
)
def test_models_that_keep_their_own_forward(name: str, tmp_path: Path) -> None:
    model = SERVED[name].write(tmp_path / "model")
    adapter = write_adapter_of_all(model, tmp_path / "adapter")

    def work(rank: Rank) -> list[list[int]]:
        runner = staged(model, rank)
        runner.load_all([adapter])
        return tokens(runner, rank, [1, 0, 1])

    expected = peft_tokens(model, [adapter, None, adapter], PROMPTS)
    assert [*run_ranks(2, work), *run_ranks(4, work)] == [expected] * 6
    assert expected != transformers_tokens(model, PROMPTS)


@pytest.mark.parametrize(
    "name",
    [
        "mixtral",
        *(pytest.param(name, marks=pytest.mark.every_architecture) for name in ("qwen2_moe", "gpt_oss")),
    ],
)
def test_experts_of_either_stage(name: str, tmp_path: Path) -> None:
    """Stacked ones, and for Mixtral the linear layers of each expert, too."""
    model = SERVED[name].write(tmp_path / "model")
    folders: list[Path | None] = [write_adapter(model, tmp_path / "stacked", 1, 0.5, r=4, **KINDS[name])]
    if name == "mixtral":
        folders.append(separate(name, tmp_path / "separate"))
    folders = [folders[0], None, folders[-1]]

    def work(rank: Rank) -> list[list[int]]:
        runner = staged(model, rank)
        runner.load_all([folder for folder in dict.fromkeys(folders) if folder is not None])
        return tokens(runner, rank, [1, 0, 1 if folders[0] == folders[2] else 2])

    expected = peft_tokens(model, folders, PROMPTS)
    assert [*run_ranks(2, work), *run_ranks(4, work)] == [expected] * 6
    assert expected != transformers_tokens(model, PROMPTS)


def test_bits_are_the_same_alone_and_among_others(llama: Path, tmp_path: Path) -> None:
    folders = [write(tmp_path / str(i), tensors=make_tensors(i)) for i in range(3)]
    params = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=0, max_tokens=6, ignore_eos=True)
    prompts, indices = [*PROMPTS, PROMPTS[0]], [1, 0, 2, 3]

    def work(rank: Rank) -> tuple[Any, Any]:
        runner = staged(llama, rank, dtype="bfloat16")
        runner.load_all(folders)
        together, _ = generate(runner.runner, prompts, rank, params, budget=18, adapters=indices)
        alone = [
            generate(runner.runner, [prompt], rank, params, budget=64, adapters=[index])[0][0]
            for prompt, index in zip(prompts, indices, strict=True)
        ]
        return together, alone

    (together, alone), (other, _) = run_ranks(2, work)
    assert together == alone == other
    assert together[0] != together[3]


# ---------------------------------------------------------------- refusals


def swapped(tensors: Tensors) -> Tensors:
    """With what is of one layer in the place of what is of the other."""
    names = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    return {
        next((name.replace(a, b) for a, b in names.items() if a in name), name): tensor
        for name, tensor in tensors.items()
    }


def faulty_adapters(folder: Path) -> list[Path]:
    """Adapters with all faults of `WRONG_TENSORS` and some more, each once in either layer."""
    other = CONFIG | {"target_modules": ["layers.1.self_attn.q_proj", "layers.0.mlp.down_proj"]}
    folders = []
    for name, (change, _) in WRONG_TENSORS.items():
        folders.append(write(folder / name, tensors=changed(change)))
        folders.append(write(folder / f"{name}, swapped", other, swapped(changed(change))))
    for module in ("lm_head", "embed_tokens", "score"):
        folders.append(write(folder / module, CONFIG | {"modules_to_save": [module]}))
    whole = {"modules_to_save": ["lm_head", "embed_tokens"]}
    for name, sizes in (("smaller", (100, 100)), ("larger", (130, 130)), ("unequal", (130, 131))):
        rows = {
            f"base_model.model.{module}.weight": torch.zeros(size, 64)
            for module, size in zip(("lm_head", "model.embed_tokens"), sizes, strict=True)
        }
        folders.append(write(folder / name, CONFIG | whole, make_tensors() | rows))
    return folders


def test_all_stages_refuse_what_one_worker_does_in_its_words(llama: Path, tmp_path: Path) -> None:
    folders = faulty_adapters(tmp_path)

    limits = replace(LIMITS, extra_vocab_size=1)

    def errors(runner: AdaptedRunner) -> list[tuple[str | None, str | None]]:
        messages = [runner.load(1 + i, folder) for i, folder in enumerate(folders)]
        own = runner.runner.adapters
        assert own.num_bytes == 0
        return [(message.error, message.error_type) for message in messages]

    expected = errors(AdaptedRunner(llama, limits))
    assert all(error is not None for error, _ in expected)
    for found in run_ranks(2, lambda rank: errors(staged(llama, rank, limits=limits))):
        assert found == expected


def test_what_one_stage_refuses_no_stage_has(tmp_path: Path) -> None:
    """A tensor of the second one, which is of no linear layer."""
    model = SERVED["falcon_mamba"].write(tmp_path / "model")
    module, conv = "backbone.layers.0.mixer.out_proj", "backbone.layers.1.mixer.conv1d"
    bias = load_file(model / "model.safetensors")[f"{conv}.bias"]
    config, name = CONFIG | {"target_modules": [module], "bias": "all"}, f"base_model.model.{conv}.bias"
    tensors = make_tensors(0, {module: (64, 100)})
    other = write(tmp_path / "other", config, tensors | {name: bias})
    good = write(tmp_path / "good", CONFIG | {"target_modules": [module]}, tensors)

    def work(rank: Rank) -> Any:
        runner = staged(model, rank)
        message = runner.load(1, other)
        adapters = runner.runner.adapters
        adapters.drop(1)  # as the core orders where one has failed
        assert adapters.num_bytes == 0
        return message, runner.load(3, good)

    refused, loaded = map(merged_adapter, zip(*run_ranks(2, work), strict=True))
    assert refused.error is not None and f"'{conv}' is no linear layer of this model" in refused.error
    assert loaded.error is None and loaded.num_bytes == 4 * 4 * (64 + 100)
