"""A model saved as the parts of its ranks: it generates what it did, and each rank reads its own files only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pagewire.ipc.wire.worker_messages import Parallel
from pagewire.workers.errors import LoadError
from pagewire.workers.network import sharded_state
from pagewire.workers.process.calls import call
from tests.workers.architectures import ARCHITECTURES, VOCAB_SIZE, Architecture
from tests.workers.driver import Driver, load_runner
from tests.workers.parallel import pipelined
from tests.workers.parallel.test_ranks import MOE, WIDE, generate_over_ranks
from tests.workers.parallel.threads import Rank, run_ranks
from tests.workers.parity import NUM_TOKENS, make_prompts

Tokens = Sequence[list[list[int]]]


def save(folder: Path, to: Path, size: int = 2, max_size: int = 1 << 30, **fields: Any) -> Tokens:
    """Save a model over ranks by the workers' call; what each rank generates."""

    def work(rank: Rank) -> list[list[int]]:
        runner, _ = load_runner(folder, collective=rank, **fields)
        call(runner, "save_sharded_state", (str(to),), {"max_size": max_size})
        return Driver(runner).generate(make_prompts(VOCAB_SIZE), NUM_TOKENS)

    return run_ranks(size, work)


def load(folder: Path, size: int = 2, **fields: Any) -> Tokens:
    """What each rank of a saved model generates."""
    prompts = make_prompts(VOCAB_SIZE)
    results = generate_over_ranks(folder, size, prompts, load_format="sharded_state", **fields)
    return [result.tokens for result in results]


def test_files_are_written_below_the_allowed_folder_only(tmp_path: Path) -> None:
    """Not beside it, above it, or through links; nowhere without the option."""
    model, allowed = ARCHITECTURES[0].write(tmp_path / "whole"), tmp_path / "allowed"
    allowed.mkdir()
    (tmp_path / "other").mkdir()
    (allowed / "out").symlink_to(tmp_path / "other")
    (allowed / "linked").mkdir()
    (allowed / "linked" / "config.json").symlink_to(tmp_path / "config.json")
    runner, _ = load_runner(model, allowed_save_path=str(allowed))
    for path in (tmp_path / "other", allowed / ".." / "other", allowed / "out", allowed / "out" / "new"):
        with pytest.raises(PermissionError, match=r"is not below .*, the core's --allowed-save-path"):
            call(runner, "save_sharded_state", (str(path),), {})
    with pytest.raises(PermissionError, match="has symbolic links in it"):
        call(runner, "save_sharded_state", (str(allowed / "linked"),), {})
    assert not list((tmp_path / "other").iterdir()) and not (tmp_path / "config.json").exists()
    call(runner, "save_sharded_state", (str(allowed / "new" / "deep"),), {})
    assert (allowed / "new" / "deep" / "config.json").exists()
    runner, _ = load_runner(model, allowed_save_path="")
    with pytest.raises(PermissionError, match="start the core with --allowed-save-path FOLDER"):
        call(runner, "save_sharded_state", (str(allowed / "again"),), {})


@pytest.mark.parametrize(
    ("architecture", "quantization"),
    [
        (Architecture("llama", WIDE | {"tie_word_embeddings": True, "attention_bias": True}), None),
        (Architecture("llama", WIDE), "int4"),
        (Architecture("qwen3_moe", MOE), "int8"),
        (next(a for a in ARCHITECTURES if a.name == "gpt_oss"), None),
        (next(a for a in ARCHITECTURES if a.name == "gpt2"), None),
    ],
    ids=["llama", "llama-int4", "qwen3_moe-int8", "gpt_oss", "gpt2"],
)
def test_saved_models_are_what_they_were(
    architecture: Architecture, quantization: str | None, tmp_path: Path
) -> None:
    folder, saved = architecture.write(tmp_path / "whole"), tmp_path / "saved"
    expected = save(folder, saved, quantization=quantization, max_size=50_000)
    for file in folder.glob("*.safetensors"):
        file.unlink()  # nothing is read from there any more
    assert len(list(saved.glob("model-rank-1-part-*.safetensors"))) > 1
    assert load(saved) == expected


@pytest.mark.parametrize(
    ("architecture", "shards", "quantization"),
    [
        (Architecture("llama", WIDE | {"tie_word_embeddings": True}), 2, None),
        (next(a for a in ARCHITECTURES if a.name == "gpt2"), 1, None),
        pytest.param(
            *(Architecture("llama", WIDE | {"num_hidden_layers": 5}), 2, "int4"),
            marks=pytest.mark.every_architecture,
        ),
        pytest.param(
            *(next(a for a in ARCHITECTURES if a.name == "gpt_oss"), 2, None),
            marks=pytest.mark.every_architecture,
        ),
    ],
    ids=["llama", "gpt2", "llama-int4", "gpt_oss"],
)
def test_saved_stages_are_what_they_were(
    architecture: Architecture, shards: int, quantization: str | None, tmp_path: Path
) -> None:
    folder, saved = architecture.write(tmp_path / "whole"), tmp_path / "saved"
    prompts = make_prompts(VOCAB_SIZE)

    def work(rank: Rank) -> Any:
        parallel = Parallel(rank.rank, rank.size, stages=2)
        if saved.exists() and not list(folder.glob("*.safetensors")):
            runner, _ = load_runner(saved, rank, parallel=parallel, load_format="sharded_state")
        else:
            runner, _ = load_runner(folder, rank, parallel=parallel, quantization=quantization)
            call(runner, "save_sharded_state", (str(saved),), {"max_size": 50_000})
        return pipelined.generate(runner, prompts, rank)[0]

    expected = run_ranks(2 * shards, work)
    for file in folder.glob("*.safetensors"):
        file.unlink()  # nothing is read from there any more
    assert run_ranks(2 * shards, work) == expected
    layers = [
        {name.partition("layers.")[2].partition(".")[0] for name in names_in(saved, rank)} - {""}
        for rank in range(2 * shards)
    ]
    if architecture.name == "llama":  # each file holds the layers of its stage
        assert not layers[0] & layers[-1] and layers[0] == layers[shards - 1]


def names_in(folder: Path, rank: int) -> list[str]:
    """The names of all tensors of a rank."""
    files = folder.glob(f"model-rank-{rank}-part-*.safetensors")
    return [name for file in files for name in load_file(file)]


def test_stages_are_loaded_as_they_were_saved(tmp_path: Path) -> None:
    deep = WIDE | {"num_hidden_layers": 3}
    folder, saved = Architecture("llama", deep).write(tmp_path / "whole"), tmp_path / "saved"

    def start(rank: Rank, stages: int, layers: tuple[int, ...] = (), saves: bool = False) -> None:
        parallel = Parallel(rank.rank, rank.size, stages=stages, layers=layers)
        form = "auto" if saves else "sharded_state"
        runner, _ = load_runner(folder if saves else saved, rank, parallel=parallel, load_format=form)
        if saves:
            call(runner, "save_sharded_state", (str(saved),), {})

    run_ranks(2, lambda rank: start(rank, 2, saves=True))
    with pytest.raises(LoadError, match="was saved with pipeline_parallel_size=2, not 1: save it anew"):
        run_ranks(2, lambda rank: start(rank, 1))
    with pytest.raises(LoadError, match=r"with other layers in the stage of rank [01]: .*PP_LAYER_PARTITION"):
        run_ranks(2, lambda rank: start(rank, 2, (1, 2)))
    run_ranks(2, lambda rank: start(rank, 2, (2, 1)))


def test_a_rank_reads_no_file_of_another(tmp_path: Path) -> None:
    folder, saved = Architecture("llama", WIDE).write(tmp_path / "whole"), tmp_path / "saved"
    save(folder, saved)
    for file in saved.glob("model-rank-0-*"):
        file.unlink()
    with pytest.raises(LoadError, match="model-rank-0-part-0"):
        load(saved)

    def work(rank: Rank) -> set[str]:
        from pagewire.ipc.wire.worker_messages import WorkerConfig
        from pagewire.workers.module.configuration import load_config

        if rank.rank == 0:
            return set()
        config = WorkerConfig(str(saved), load_format="sharded_state")
        state = sharded_state.ShardedState(config, load_config(config), rank)
        return set(state.manifest.files)

    assert run_ranks(2, work)[1] == {"model-rank-1-part-0.safetensors"}


def test_what_does_not_fit_a_saved_model_is_refused(tmp_path: Path) -> None:
    folder, saved = Architecture("llama", WIDE).write(tmp_path / "whole"), tmp_path / "saved"
    save(folder, saved)
    with pytest.raises(LoadError, match="part for rank 0 of 1, but parts of 2 ranks"):
        load_runner(saved, load_format="sharded_state")
    with pytest.raises(LoadError, match="was saved with dtype='float32', not 'bfloat16'"):
        load(saved, dtype="bfloat16")
    with pytest.raises(LoadError, match="was saved with quantization=None, not 'int8'"):
        load(saved, quantization="int8")
    with pytest.raises(ValueError, match="save to a folder of its own"):
        save(folder, saved)
    with pytest.raises(LoadError, match="but parts of none"):
        load(folder)


@pytest.mark.parametrize(
    "pattern", ["model.safetensors", "{rank}.safetensors", "../{rank}-{part}.safetensors", "{rank}-{part}"]
)
def test_patterns_that_name_no_files_are_refused(pattern: str, llama: Path, tmp_path: Path) -> None:
    runner, _ = load_runner(llama)
    with pytest.raises(ValueError, match="a pattern such as"):
        call(runner, "save_sharded_state", (str(tmp_path / "saved"), pattern), {})


def test_other_numbers_in_a_part_are_noticed(tmp_path: Path) -> None:
    folder, saved = Architecture("llama", WIDE).write(tmp_path / "whole"), tmp_path / "saved"
    save(folder, saved)
    other = Architecture("llama", WIDE).write(tmp_path / "other", seed=1)
    save(other, tmp_path / "other saved")
    name = "model-rank-1-part-0.safetensors"
    (saved / name).write_bytes((tmp_path / "other saved" / name).read_bytes())
    with pytest.raises(LoadError, match="its logits with paged attention are wrong"):
        load(saved)
