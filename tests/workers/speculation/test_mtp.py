"""Multi-token-prediction layers against a plain implementation of their arithmetic, on random checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from pagewire.ipc.speculative import SpeculativeConfig
from pagewire.kernels.data.integers import Integers
from pagewire.workers.checkpoint.headers import read_headers
from pagewire.workers.errors import LoadError
from pagewire.workers.estimate.fit import sizes_of
from pagewire.workers.network import build_module as modules
from pagewire.workers.process.calls import call
from pagewire.workers.run.runner import Runner
from pagewire.workers.speculation.mtp_checkpoint import read_layers
from tests.workers.architectures import VOCAB_SIZE
from tests.workers.driver import GREEDY, load_runner
from tests.workers.parity import make_prompts
from tests.workers.quantised_models import PartsFormat, write_quantised
from tests.workers.speculation.mtp_models import MtpOracle, write_mtp
from tests.workers.speculation.speculating import Speculated, SpeculativeDriver

NUM_DRAFTS = 3


def mtp_runner(folder: Path, num_drafts: int = NUM_DRAFTS, **fields: Any) -> Runner:
    """A runner of a model that drafts with its own layers."""
    return load_runner(folder, speculative=SpeculativeConfig("mtp", None, num_drafts), **fields)[0]


def speculate(runner: Runner) -> list[Speculated]:
    """Prompts in chunks, drafts that are wrong, steps without drafts, a preemption, and a shared prefix."""
    driver = SpeculativeDriver(runner, 13, lambda step, slot: (step + slot) % (NUM_DRAFTS + 1))
    prompts = make_prompts(VOCAB_SIZE)
    sequences = [driver.add(i, prompt, GREEDY) for i, prompt in enumerate(prompts)]
    driver.run(sequences, 5)
    first = sequences[0]
    whole = driver.end(first, keep_blocks=True)[: len(prompts[0]) // runner.config.block_size]
    again = driver.add(5, first.tokens, GREEDY, num_prompt_tokens=len(prompts[0]))
    shared = driver.add(6, [*prompts[0], 9], GREEDY, cached=whole)
    driver.run([*sequences[1:], again, shared], 8)
    return [*sequences, again, shared]


@pytest.mark.parametrize(
    ("name", "num_mtp", "form"),
    [
        ("deepseek_v3", 1, {"copies": True}),
        ("glm4_moe", 1, {"own": True}),
        ("glm4_moe_lite", 2, {}),
    ],
)
def test_drafts_are_those_of_the_formula(
    tmp_path: Path, name: str, num_mtp: int, form: dict[str, bool]
) -> None:
    runner = mtp_runner(write_mtp(tmp_path, name, num_mtp, **form))
    sequences = speculate(runner)
    proposals = [proposal for s in sequences for proposal in s.proposals]
    assert {len(proposal.drafts) for proposal in proposals} == {1, 2, 3}
    MtpOracle(tmp_path).check(proposals)


def test_sleep_and_memory_include_the_layers(tmp_path: Path) -> None:
    write_mtp(tmp_path, "deepseek_v3", 2, copies=True)
    runner = mtp_runner(tmp_path)
    full = runner.memory()
    assert full["kv_cache"] == 64 * runner.block_bytes + runner.drafter.spare_bytes
    assert full["weights"] == runner.model.weight_bytes + runner.drafter.weight_bytes
    sizes = sizes_of(read_headers(tmp_path), runner.config, "avx2")
    assert sizes.drafter is not None
    size = runner.config.block_size
    assert sizes.drafter.kv_token_bytes * size == runner.drafter.block_bytes
    assert sizes.kv_token_bytes * size == runner.block_bytes - runner.drafter.block_bytes
    parameters = sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values())
    copied = 2 * 2 * VOCAB_SIZE * 64
    assert sizes.parameters + sizes.drafter.parameters == parameters - copied
    call(runner, "sleep", [2], {})
    asleep = runner.memory()
    assert asleep["weights"] == asleep["kv_cache"] == 0
    call(runner, "wake_up", [None], {})
    assert all(runner.memory()[name] == full[name] for name in ("weights", "kv_cache"))
    driver = SpeculativeDriver(runner, wanted=lambda *_: NUM_DRAFTS)
    sequence = driver.add(0, [5, 6, 7], GREEDY)
    driver.run([sequence], 4)
    MtpOracle(tmp_path).check(sequence.proposals)


def test_layers_are_quantised_as_the_checkpoint_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafts are those of a checkpoint with the same numbers, dequantised."""

    def scheme_of(module: str) -> Integers | None:
        return Integers(8, None, 0) if module.endswith("_proj") else None

    dense = write_mtp(tmp_path / "dense", "glm4_moe")
    quantised, plain = write_quantised(dense, tmp_path, scheme_of)
    monkeypatch.setattr(modules, "format_of", lambda settings: PartsFormat())
    runner = mtp_runner(quantised)
    assert runner.drafter.weight_bytes < mtp_runner(dense).drafter.weight_bytes / 2
    driver = SpeculativeDriver(runner, wanted=lambda *_: 1)
    sequences = [driver.add(i, prompt, GREEDY) for i, prompt in enumerate(make_prompts(VOCAB_SIZE))]
    driver.run(sequences, 6)
    oracle, proposals = MtpOracle(plain), [proposal for s in sequences for proposal in s.proposals]
    same = sum(oracle.drafts(proposal.before, 1) == proposal.drafts for proposal in proposals)
    assert same >= 0.8 * len(proposals) > 10, "activations are rounded to 8 bits"


def test_models_without_such_layers_are_refused(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(LoadError, match=r"of llama are not served: those of deepseek_v3.*'draft_model'"):
        mtp_runner(llama)
    folder = write_mtp(tmp_path, "glm4_moe")
    plain = load_runner(folder)[0]

    def read(**changes: Any) -> None:
        config = msgspec.structs.replace(plain.config, **changes)
        read_layers(config, plain.model, plain.device, plain.collective)

    with pytest.raises(LoadError, match=r"of ernie4_5_moe are not served: .* another layout"):
        read(hf_overrides={"model_type": "ernie4_5_moe"})
    with pytest.raises(LoadError, match=r"load_format is 'dummy'.*'ngram'"):
        read(load_format="dummy")
    with pytest.raises(LoadError, match=r"config\.json names none"):
        read(hf_overrides={"num_nextn_predict_layers": 0})
    with pytest.raises(LoadError, match=r"lacks the multi-token.*model\.layers\.3\.\*\).*'ngram'"):
        read(hf_overrides={"num_nextn_predict_layers": 2})
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.hnorm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoadError, match=r"lacks 1 weights of glm4_moe: model\.layers\.2\.hnorm\.weight"):
        read()


def test_only_layers_with_a_projection_are_taken_for_such(tmp_path: Path) -> None:
    """A model whose config.json counts too few layers is refused as before."""
    folder = write_mtp(tmp_path, "glm4_moe")
    assert load_runner(folder)[0].drafter.name is None
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.eh_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoadError, match="tensors that glm4_moe has no use for"):
        load_runner(folder)
