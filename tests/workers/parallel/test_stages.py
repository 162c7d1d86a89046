"""A model in the stages of a pipeline, in the threads of one process: to the bit what one worker computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.ipc.speculative import SpeculativeConfig
from pagewire.ipc.wire.worker_messages import Parallel, Ready, WorkerConfig
from pagewire.kernels.cpu import library
from pagewire.kernels.cpu.build import REFERENCE
from pagewire.workers.checkpoint.headers import read_headers
from pagewire.workers.errors import LoadError
from pagewire.workers.estimate.fit import sizes_of
from pagewire.workers.module import stage_cut
from pagewire.workers.network.build_module import module_on_meta
from pagewire.workers.network.network import Network
from pagewire.workers.process.wiring import open_runner
from pagewire.workers.ranks.shares import stage_layers
from pagewire.workers.ranks.stages import Stage
from pagewire.workers.run.runner import Runner
from pagewire.workers.step.context import StepContext
from pagewire.workers.weight_cache import folder as cache_folder
from pagewire.workers.weight_cache.ahead import WeightsAhead
from pagewire.workers.weight_cache.cached_loading import keep_in_background
from tests.engine_core.schedule.simulation import Forced
from tests.workers.architectures import EXPERTS, GROUPED, MODULES, SERVED, VOCAB_SIZE, Architecture
from tests.workers.driver import load_runner
from tests.workers.parallel.pipelined import Output, generate
from tests.workers.parallel.threads import Rank, Threads, run_ranks
from tests.workers.parity import make_prompts
from tests.workers.quantised_models import write_packed
from tests.workers.test_embeddings import embedded, prompt_of

UNCUT = {"gemma4_text", "gemma4_unified_text", "glm_moe_dsa"} | MODULES
"""Refused, see below."""
FORMS = (  # each has another forward, of which a stage runs a part
    *("llama with biases", "gpt2", "opt", "gemma3_text", "deepseek_v3", "gpt_oss", "phi3", "cohere"),
    *("bamba", "qwen3_5_text"),  # stages with states only, and without any
)
DEEP = GROUPED | {"num_hidden_layers": 5}
PROMPTS = make_prompts(VOCAB_SIZE)


@dataclass
class RankResult:
    """What a rank has generated, and what it had loaded."""

    outputs: list[Output]
    ready: Ready
    runner: Runner


def place(rank: Rank, stages: int, layers: tuple[int, ...] = ()) -> Parallel:
    """The place of a rank in a pipeline."""
    return Parallel(rank.rank, rank.size, stages=stages, layers=layers)


def in_stages(
    folder: Path,
    stages: int,
    shards: int = 1,
    layers: tuple[int, ...] = (),
    options: dict[str, Any] | None = None,
    **fields: Any,
) -> Sequence[RankResult]:
    """What each rank of a pipeline generates. options: of `generate`."""

    def work(rank: Rank) -> RankResult:
        runner, ready = load_runner(folder, rank, parallel=place(rank, stages, layers), **fields)
        return RankResult(generate(runner, PROMPTS, rank, **options or {})[0], ready, runner)

    return run_ranks(stages * shards, work)


def check_bits(
    folder: Path, stages: int, layers: tuple[int, ...] = (), **fields: Any
) -> Sequence[RankResult]:
    """Compare tokens and log probabilities with those of one worker."""
    runner, ready = load_runner(folder, **fields)
    expected, _ = generate(runner, PROMPTS)
    results = in_stages(folder, stages, layers=layers, **fields)
    for result in results:
        assert result.outputs == expected
        assert result.ready.vocab_size == ready.vocab_size
        assert result.runner.model.is_stack == runner.model.is_stack
    assert sum(result.ready.bytes_per_block for result in results) == ready.bytes_per_block
    return results


@pytest.mark.parametrize("name", FORMS)
def test_two_stages_compute_what_one_worker_does(name: str, tmp_path: Path) -> None:
    check_bits(SERVED[name].write(tmp_path), 2)


@pytest.mark.every_architecture
@pytest.mark.parametrize("name", sorted(SERVED.keys() - UNCUT.union(FORMS)))
def test_every_architecture_in_two_stages(name: str, tmp_path: Path) -> None:
    check_bits(SERVED[name].write(tmp_path), 2)


def test_stages_may_have_different_numbers_of_layers(tmp_path: Path) -> None:
    folder = Architecture("llama", DEEP).write(tmp_path, dtype="bfloat16")
    results = check_bits(folder, 3, (1, 3, 1), dtype="bfloat16")
    assert [len(result.runner.caches) for result in results] == [1, 3, 1]


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt_oss", marks=pytest.mark.every_architecture)])
def test_stages_of_several_ranks_compute_what_one_stage_of_as_many_does(name: str, tmp_path: Path) -> None:
    folder = SERVED[name].write(tmp_path)

    def one_stage(rank: Rank) -> list[Output]:
        return generate(load_runner(folder, rank)[0], PROMPTS, rank)[0]

    expected = run_ranks(2, one_stage)[0]
    alone, _ = generate(load_runner(folder)[0], PROMPTS)
    assert [output.tokens for output in expected] == [output.tokens for output in alone]
    for result in in_stages(folder, 2, shards=2):
        assert result.outputs == expected


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_reads_and_holds_its_own_weights_only(tied: bool, tmp_path: Path) -> None:
    folder = Architecture("llama", DEEP | {"tie_word_embeddings": tied}).write(tmp_path / "whole")
    expected, _ = generate(load_runner(folder)[0], PROMPTS)
    other = Architecture("llama", DEEP | {"tie_word_embeddings": tied}).write(tmp_path / "second")
    tensors = load_file(other / "model.safetensors")
    foreign = [f"model.layers.{index}." for index in range(3)] + ([] if tied else ["model.embed_tokens."])
    for name, tensor in tensors.items():
        if name.startswith(tuple(foreign)):
            tensor.fill_(float("nan"))
    save_file(tensors, other / "model.safetensors", {"format": "pt"})

    def work(rank: Rank) -> tuple[list[Output], Runner]:
        runner, _ = load_runner((folder, other)[rank.rank], rank, parallel=place(rank, 2))
        return generate(runner, PROMPTS, rank)[0], runner

    for rank, (outputs, runner) in enumerate(run_ranks(2, work)):
        assert outputs == expected
        assert [place.layer for place in runner.model.model.base.places] == [[0, 1, 2], [3, 4]][rank]
        assert (runner.model.model.base.words is None) == bool(rank)
        assert (runner.model.model.head is None) != bool(rank)
        # What was expected by the header alone, where all weights are copies.
        config = WorkerConfig(str(folder), parallel=Parallel(rank, 2, stages=2))
        sizes = sizes_of(read_headers(folder), config, REFERENCE)
        assert sizes.kv_token_bytes * runner.config.block_size == runner.block_bytes
    one_worker = sizes_of(read_headers(folder), WorkerConfig(str(folder), dtype="bfloat16"), REFERENCE)
    parts = [
        sizes_of(
            read_headers(folder),
            WorkerConfig(str(folder), dtype="bfloat16", parallel=Parallel(rank, 2, stages=2)),
            REFERENCE,
        )
        for rank in range(2)
    ]
    assert sum(part.weight_bytes for part in parts) == pytest.approx(one_worker.weight_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", {"kv_cache_dtype": "int8"}),
        ("qwen3_moe", {"quantization": "int4"}),
        pytest.param("qwen2_moe", {"load_format": "dummy"}, marks=pytest.mark.every_architecture),
        ("gpt2", {"load_format": "dummy"}),
    ],
)
def test_other_forms_of_weights_and_caches(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    sizes = {} if name == "gpt2" else DEEP | {"hidden_size": 128, "intermediate_size": 256}
    architecture = SERVED[name]
    experts = EXPERTS | {"moe_intermediate_size": 64} if "moe" in name else {}
    check_bits(Architecture(name, architecture.fields | sizes | experts).write(tmp_path), 2, **fields)


@pytest.mark.every_architecture
def test_a_quantised_checkpoint(tmp_path: Path) -> None:
    sizes = DEEP | {"hidden_size": 128, "intermediate_size": 256}
    folder, _ = write_packed(Architecture("llama", sizes).write(tmp_path / "dense"), tmp_path, group=32)
    check_bits(folder, 2)


class Parrot(Forced):
    """Drafts what a sequence said before, and now and then something else."""

    def __init__(self, expected: Sequence[Output]) -> None:
        super().__init__()
        self.expected = expected

    def propose(self, sequence: Any, limit: int) -> list[int]:
        done = sequence.num_output_tokens
        drafts = self.expected[sequence.key].tokens[done : done + 3]
        return [*drafts[:-1], 5] if done % 3 == 0 else drafts


def test_preemption_and_drafts_change_nothing(llama: Path) -> None:
    expected, _ = generate(load_runner(llama)[0], PROMPTS)

    def work(rank: Rank) -> tuple[list[Output], list[Output], int]:
        runner, _ = load_runner(llama, rank, parallel=place(rank, 2))
        few, scheduler = generate(runner, PROMPTS, rank, num_blocks=16)
        drafted, _ = generate(runner, PROMPTS, rank, speculation=Parrot(expected))
        return few, drafted, scheduler.stats.num_preemptions

    for few, drafted, num_preemptions in run_ranks(2, work):
        assert few == expected and num_preemptions
        assert drafted == expected


@pytest.mark.parametrize("name", ["llama", "gpt2", pytest.param("opt", marks=pytest.mark.every_architecture)])
def test_the_first_stage_lays_embeddings_over(name: str, tmp_path: Path) -> None:
    folder = SERVED[name].write(tmp_path)
    rows = embedded(folder, PROMPTS)
    prompts = [prompt_of(rows[0]), PROMPTS[1], prompt_of(rows[1], PROMPTS[2]), prompt_of(rows[3])]
    runner, ready = load_runner(folder)
    expected, _ = generate(runner, prompts)

    def work(rank: Rank) -> tuple[list[Output], int]:
        part, part_ready = load_runner(folder, rank, parallel=place(rank, 2))
        return generate(part, prompts, rank)[0], part_ready.embedding_size

    for shards in (1, 2) if name == "llama" else (1,):
        outputs = run_ranks(2 * shards, work)
        assert all(size == ready.embedding_size > 0 for _, size in outputs)
        for found, _ in outputs:
            if shards == 1:
                assert found == expected  # to the bit
            assert [output.tokens for output in found] == [output.tokens for output in expected]


# ---------------------------------------------------------------- packed weights


def test_the_second_start_is_from_packed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if library.choose() is None:
        pytest.skip("there are no compiled kernels here")
    monkeypatch.setattr(cache_folder, "cache_root", lambda: tmp_path / "cache")
    folder = Architecture("llama", DEEP).write(tmp_path / "model")

    def start(rank: Rank) -> tuple[list[Output], bool]:
        sizes = {"max_model_len": 64, "max_num_seqs": 8, "num_blocks": 64, "block_size": 4}
        config = WorkerConfig(str(folder), **sizes, num_threads=1, weight_cache=True, parallel=place(rank, 2))
        ahead = WeightsAhead(config)
        runner, ready = open_runner(config, lambda *_: None, ahead, rank)
        if (thread := keep_in_background(runner.model, ahead, runner.collective)) is not None:
            thread.join()
        return generate(runner, PROMPTS, rank)[0], "packed weights" in ready.startup_seconds

    shards = 2  # whose vocabulary is divided, too
    first, second = run_ranks(2 * shards, start), run_ranks(2 * shards, start)
    assert [outputs for outputs, _ in second] == [outputs for outputs, _ in first]
    assert [kept for _, kept in (*first, *second)] == [False] * 4 + [True] * 4


# ---------------------------------------------------------------- refusals


def test_layers_that_cannot_be_divided_are_refused(llama: Path) -> None:
    with pytest.raises(LoadError, match=r"2 layers cannot be divided over 3 stages: .* up to 2 works"):
        in_stages(llama, 3)
    with pytest.raises(LoadError, match="PAGEWIRE_PP_LAYER_PARTITION=2,1 has 3 layers, and the model 2"):
        in_stages(llama, 2, layers=(2, 1))
    divided = [stage_layers(7, Parallel(rank, 6, stages=3)) for rank in range(6)]
    assert divided == [range(3)] * 2 + [range(3, 5)] * 2 + [range(5, 7)] * 2


def test_a_module_whose_layers_are_not_known_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which a stage saves its own weights alone."""
    monkeypatch.setattr(stage_cut, "_outermost_lists", lambda _: iter(()))
    causal = module_on_meta(WorkerConfig(""), SERVED["llama"].config(), torch.float32)
    stage = Stage(range(1), 0, 2, Rank(0, Threads(2)), 64, torch.float32, torch.device("cpu"))
    with pytest.raises(
        LoadError, match=r"LlamaModel cannot be cut into stages: .*; use pipeline_parallel_size=1"
    ):
        stage_cut.cut_down(causal, stage)


def test_layers_that_read_keys_of_earlier_ones_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"layers read keys and values of earlier layers, .*_parallel_size=1"):
        in_stages(SERVED["gemma4_text"].write(tmp_path / "gemma"), 2)
    with pytest.raises(LoadError, match="its layers read what indexers of earlier layers have chosen"):
        in_stages(SERVED["glm_moe_dsa"].write(tmp_path / "glm"), 2)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_what_runs_as_a_module_is_refused_with_the_way_out(name: str, tmp_path: Path) -> None:
    """Before weights are read: whether layers could be cut does not count."""
    folder = SERVED[name].write(tmp_path)
    (folder / "model.safetensors").unlink()
    words = (
        f"{name} is served without pipeline_parallel_size: its layers run as transformers' module .* describe"
    )
    with pytest.raises(LoadError, match=words):
        load_runner(folder, parallel=Parallel(0, 2, stages=2))


def test_what_the_stages_compute_is_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that get lost between stages are noticed by the logits, in every stage."""
    forward = Network.__call__

    def lose(network: Network, ids: torch.Tensor, positions: torch.Tensor, step: StepContext) -> torch.Tensor:
        step.received = None if step.received is None else torch.zeros_like(step.received)
        return forward(network, ids, positions, step)

    monkeypatch.setattr(Network, "__call__", lose)
    with pytest.raises(LoadError, match=r"its logits with paged attention are wrong"):
        in_stages(SERVED["llama"].write(tmp_path), 2)


def test_models_that_pool_are_refused(llama: Path) -> None:
    with pytest.raises(LoadError, match="leave pipeline_parallel_size at 1 and use tensor_parallel_size"):
        in_stages(llama, 2, convert="embed")


def test_drafts_by_a_model_are_refused(llama: Path) -> None:
    speculative = SpeculativeConfig("draft_model", str(llama), 5)
    with pytest.raises(LoadError, match=r"'draft_model' needs pipeline_parallel_size 1, not 2.*'ngram'"):
        in_stages(llama, 2, speculative=speculative)
