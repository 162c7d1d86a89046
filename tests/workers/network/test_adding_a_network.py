"""The page "Add a kind of network" of docs/architecture/extending.md: its code runs here as it stands there."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.ipc.wire.pooling import PoolingParams
from pagewire.ipc.wire.worker_messages import Parallel, WorkerConfig
from pagewire.kernels.cpu import library
from pagewire.workers.errors import DisprovenError, LoadError
from pagewire.workers.families import encoder_structures, structures
from pagewire.workers.network import loading, pooling_files
from pagewire.workers.network.module_base import ModuleBase
from pagewire.workers.network.network import Network
from pagewire.workers.network.pooling_info import spec_of
from pagewire.workers.process.wiring import open_runner
from pagewire.workers.run.runner import Runner
from pagewire.workers.weight_cache import folder as cache_folder
from pagewire.workers.weight_cache.ahead import WeightsAhead
from pagewire.workers.weight_cache.cached_loading import keep_in_background
from tests.workers import pooled
from tests.workers.parity import make_prompts

NAME = "bert-generation"
PAGE = Path(__file__).parents[3] / "docs" / "architecture" / "extending.md"
TOKENS = PoolingParams(task="token_embed", all_tokens=True)
PROMPTS = make_prompts(128, (23, 1, 40))


def code_of_the_page() -> str:
    """The first block of code below the page's heading."""
    _, _, page = PAGE.read_text(encoding="utf-8").partition("\n## Add a kind of network\n")
    found = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Random weights of a family that transformers has and that no structure names; all tables are copies."""
    monkeypatch.setattr(encoder_structures, "STRUCTURES", dict(encoder_structures.STRUCTURES))
    monkeypatch.setattr(pooling_files, "ENCODERS", set(pooling_files.ENCODERS))
    monkeypatch.setitem(pooled.MORE_ENCODERS, NAME, pooled.SIZES | {"pad_token_id": 0})
    return pooled.write(tmp_path / "model", NAME)


def worker_config(folder: Path, **fields: Any) -> WorkerConfig:
    sizes: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 8, "block_size": 4, "num_threads": 1}
    return WorkerConfig(str(folder), convert="embed", **(sizes | {"num_blocks": 64} | fields))


def start(folder: Path, **fields: Any) -> tuple[Runner, WeightsAhead]:
    ahead = WeightsAhead(worker_config(folder, **fields))
    return open_runner(ahead.config, lambda *_: None, ahead)[0], ahead


def check(runner: Runner, folder: Path) -> None:
    """The hidden states of all tokens are those of transformers."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, found in zip(PROMPTS, pooled.pool(runner, PROMPTS, TOKENS), strict=True):
        with torch.inference_mode():
            states = model(torch.tensor([prompt]))[0][0]
        torch.testing.assert_close(found, torch.nn.functional.normalize(states), atol=2e-5, rtol=2e-5)


def test_the_page_makes_a_network(checkpoint: Path) -> None:
    """Of what ran before as a module; whole or quantised, and over one rank only."""
    code = code_of_the_page()
    assert code.count("\n") < 60
    pooling_files.ENCODERS.add(NAME)
    runner, _ = start(checkpoint)
    assert isinstance(runner.model.model.base, ModuleBase)
    check(runner, checkpoint)
    pooling_files.ENCODERS.remove(NAME)
    exec(code, {})
    runner, _ = start(checkpoint)
    assert isinstance(runner.model.model.base, Network)
    check(runner, checkpoint)
    runner, _ = start(checkpoint, quantization="int8", dtype="bfloat16")
    base = runner.model.model.base
    assert isinstance(base, Network) and base.stack.layers[1].down.scheme.bits == 8
    with pytest.raises(LoadError, match="an encoder runs in one worker"):
        spec_of(worker_config(checkpoint, parallel=Parallel(0, 2)))


def test_its_second_start_needs_no_checkpoint(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library.choose() is None:
        pytest.skip("packed weights are those of compiled kernels")
    monkeypatch.setattr(cache_folder, "cache_root", lambda: tmp_path / "cache")
    exec(code_of_the_page(), {})
    first, ahead = start(checkpoint, weight_cache=True)
    thread = keep_in_background(first.model, ahead, first.collective)
    assert thread is not None
    thread.join()
    second, ahead = start(checkpoint, weight_cache=True)
    assert ahead.packed is not None and isinstance(second.model.model.base, Network)
    check(second, checkpoint)


@pytest.mark.parametrize(
    "change",
    [
        lambda part: replace(part, norms=part.norms[::-1]),
        lambda part: replace(part, qkv=(part.qkv[1], part.qkv[0], part.qkv[2])),
        lambda part: replace(part, scale=2 * part.head_dim**-0.5),
    ],
    ids=["norms", "queries", "scale"],
)
def test_a_wrong_part_is_refused_and_the_module_runs(
    change: Callable[[structures.LayerParts], structures.LayerParts],
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exec(code_of_the_page(), {})
    right = encoder_structures.STRUCTURES[NAME]
    encoder_structures.STRUCTURES[NAME] = replace(
        right, layers=lambda base, numbers: map(change, right.layers(base, numbers))
    )
    prove, refused = loading.prove, []

    def noted(*arguments: Any) -> Any:
        try:
            return prove(*arguments)
        except DisprovenError as error:
            refused.append(str(error))
            raise

    monkeypatch.setattr(loading, "prove", noted)
    runner, _ = start(checkpoint)
    assert len(refused) == 1 and "its hidden states are wrong" in refused[0]
    assert isinstance(runner.model.model.base, ModuleBase)
    check(runner, checkpoint)
