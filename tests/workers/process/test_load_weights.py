"""A worker that got other weights is like one that was started with them, in every form of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from pagewire.ipc.files.weight_files import state_of
from pagewire.ipc.wire.items import TensorForm, WeightFile
from pagewire.ipc.wire.lora import LoRAConfig
from pagewire.workers.errors import LostRankError
from pagewire.workers.process.calls import call
from pagewire.workers.run.runner import Runner
from tests.test_imports import run_python
from tests.workers.architectures import GROUPED, VOCAB_SIZE, Architecture
from tests.workers.driver import Driver, load_runner
from tests.workers.parallel.threads import Rank, run_ranks
from tests.workers.parity import NUM_TOKENS, make_prompts

PROMPTS = make_prompts(VOCAB_SIZE)
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same tiny Llama with other weights."""
    return Architecture("llama", GROUPED).write(tmp_path_factory.mktemp("other"), seed=1)


def file_at(path: Path) -> list[Any]:
    """A file, as the core sends it."""
    return [str(path), state_of(str(path))]


def load(runner: Runner, *paths: Path) -> None:
    call(runner, "load_weights", [[file_at(path) for path in paths]], {})


def run(runner: Runner) -> list[list[int]]:
    return Driver(runner).generate(PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize(
    "options",
    [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "bfloat16"}, {"num_threads": 2}],
    ids=str,
)
def test_like_a_fresh_worker(llama: Path, other: Path, options: dict[str, Any]) -> None:
    runner, _ = load_runner(llama, **options)
    before, expected = run(runner), run(load_runner(other, **options)[0])
    load(runner, other / WEIGHTS)
    assert run(runner) == expected != before
    load(runner, other / WEIGHTS, llama / WEIGHTS)
    assert run(runner) == before, "the last file's tensors count"
    fresh, _ = load_runner(llama, **options, weights=[WeightFile(*file_at(other / WEIGHTS))])
    assert run(fresh) == expected, "a worker that is started with them"


def test_some_tensors_in_another_dtype(llama: Path, other: Path, tmp_path: Path) -> None:
    """What is not given stays; parts of a joined matrix may be of different dtypes."""
    own, new = load_file(llama / WEIGHTS), load_file(other / WEIGHTS)
    some = [name for name in new if "q_proj" in name or "up_proj" in name or "norm" in name]
    rounded = {name: new[name].bfloat16() for name in some}
    save_file(rounded, tmp_path / "some.safetensors")
    for path in llama.iterdir():
        if path.name != WEIGHTS:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file(own | {name: tensor.float() for name, tensor in rounded.items()}, tmp_path / WEIGHTS)
    runner, _ = load_runner(llama, weight_cache=True)
    load(runner, tmp_path / "some.safetensors")
    assert run(runner) == run(load_runner(tmp_path)[0])
    assert len(some) > 3


def test_ranks_change_together(llama: Path, other: Path) -> None:
    expected = run(load_runner(other)[0])

    def work(rank: Rank) -> list[list[int]]:
        runner, _ = load_runner(llama, collective=rank)
        run(runner)
        load(runner, other / WEIGHTS)
        return run(runner)

    assert run_ranks(2, work) == [expected] * 2


def test_a_rank_that_cannot_read_them_ends(llama: Path, tmp_path: Path) -> None:
    missing = [str(tmp_path / "none.safetensors"), [1, 2, 3, 4]]

    def work(rank: Rank) -> str:
        runner, _ = load_runner(llama, collective=rank)
        with pytest.raises(LostRankError) as raised:
            call(runner, "load_weights", [[missing]], {})
        return str(raised.value)

    assert run_ranks(2, work) == ["the file of new weights cannot be read: No such file or directory"] * 2


def test_files_that_were_written_to(llama: Path, other: Path, tmp_path: Path) -> None:
    path = tmp_path / "new.safetensors"
    save_file(load_file(other / WEIGHTS), path)
    sent = file_at(path)
    save_file({name: tensor + 1 for name, tensor in load_file(other / WEIGHTS).items()}, path)
    runner, _ = load_runner(llama)
    with pytest.raises(RuntimeError, match="was written to after update_weights read it"):
        call(runner, "load_weights", [[sent]], {})


def test_memory_is_given_back(llama: Path, other: Path) -> None:
    runner, _ = load_runner(llama)
    before = runner.memory()
    load(runner, other / WEIGHTS)
    after = runner.memory()
    assert {name: after[name] for name in ("weights", "kv_cache")} == {
        name: before[name] for name in ("weights", "kv_cache")
    }


def test_what_can_be_replaced(llama: Path, runner: Runner) -> None:
    tensors: list[TensorForm] = call(runner, "weight_tensors", [], {})
    own = load_file(llama / WEIGHTS)
    assert {tensor.name: tensor.shape for tensor in tensors} == {
        name: list(tensor.shape) for name, tensor in own.items()
    }


def test_what_cannot(llama: Path, runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_code = {"auto_map": {"AutoModel": "own.Own"}, "model_type": "own"}
    for fields, text in [
        ({"load_format": "dummy"}, "load_format 'dummy' has no safetensors files"),
        ({"model_path": str(tmp_path / "model.gguf")}, "a GGUF file names its weights otherwise"),
        ({"lora": LoRAConfig()}, "start without enable_lora"),
        ({"media": True}, "what encodes pictures and sound is not read again"),
        ({"hf_overrides": {"quantization_config": {"quant_method": "gptq"}}}, "the checkpoint is quantised"),
        ({"hf_overrides": own_code, "trust_remote_code": True}, "models with code of their own"),
    ]:
        with monkeypatch.context() as patch:
            for name, value in fields.items():
                patch.setattr(runner.config, name, value)
            with pytest.raises(ValueError, match=f"update_weights: .*{text}"):
                call(runner, "weight_tensors", [], {})


SAYS_WHAT_CAN_BE_REPLACED = """
import sys
from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.checkpoint.replaced import replaceable

print(len(replaceable(WorkerConfig(model_path=sys.argv[1]))), "transformers" in sys.modules)
"""


def test_what_can_be_replaced_is_said_without_transformers(llama: Path, tmp_path: Path) -> None:
    """A worker of packed weights has not imported it, and streams would wait for seconds while it did."""
    printed = run_python(SAYS_WHAT_CAN_BE_REPLACED, str(llama), cwd=tmp_path)
    assert printed.split() == [str(len(load_file(llama / WEIGHTS))), "False"]
