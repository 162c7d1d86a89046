"""Adapters that are broken, of another model, or not served: clear errors, and nothing disturbed."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from pagewire.ipc.wire.lora import DropAdapter, LoadAdapter, LoRAConfig
from pagewire.ipc.wire.params import SamplingParams
from pagewire.workers.adapters.config import AdapterConfig
from pagewire.workers.adapters.files import TENSORS, read_files
from pagewire.workers.adapters.loader import Adapters
from pagewire.workers.errors import LoadError
from tests.workers import pooled
from tests.workers.architectures import SERVED
from tests.workers.driver import Driver, load_runner
from tests.workers.peft_adapters import AdaptedRunner
from tests.workers.random_adapters import CONFIG, Q, Tensors, make_tensors, write

LIMITS = LoRAConfig(max_lora_rank=8)


@pytest.fixture(scope="module")
def runner(llama: Path) -> AdaptedRunner:
    return AdaptedRunner(llama, LIMITS)


def changed(change: Callable[[Tensors], object]) -> Tensors:
    tensors = make_tensors()
    change(tensors)
    return tensors


A, B = f"base_model.model.{Q}.lora_A.weight", f"base_model.model.{Q}.lora_B.weight"
WRONG_TENSORS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "other inputs": (
        lambda t: t.update({A: torch.zeros(4, 96)}),
        r"\(4, 96\) where this model needs \(4, 64\)",
    ),
    "other outputs": (lambda t: t.update({B: torch.zeros(128, 4)}), r"adapter is of 'some/llama'"),
    "another rank": (lambda t: t.update({A: torch.zeros(2, 64)}), "has rank 2, its configuration says 4"),
    "no second matrix": (lambda t: t.pop(B), "lora_A and lora_B go together"),
    "a missing module": (lambda t: (t.pop(A), t.pop(B)), f"tensors of '{Q}' are missing"),
    "NaN": (lambda t: t[A].fill_(torch.nan), "not finite in torch.float32"),
    "infinity": (lambda t: t[B].view(-1)[3:4].fill_(torch.inf), "not finite"),
    "an unknown module": (
        lambda t: t.update({A.replace("q_proj", "r_proj"): t[A]}),
        "no linear layer of this model",
    ),
    "a module not named": (
        lambda t: t.update(
            {A.replace("layers.0", "layers.1"): t[A], B.replace("layers.0", "layers.1"): t[B]}
        ),
        "target_modules does not name it",
    ),
    "a layer too many": (lambda t: t.update({A.replace("layers.0", "layers.9"): t[A]}), "no linear layer"),
    "an unknown kind": (lambda t: t.update({f"base_model.model.{Q}.lora_C": t[A]}), "is not served"),
    "another prefix": (lambda t: t.update({"model.x.lora_A.weight": t[A]}), "is not served"),
    "integers": (lambda t: t.update({A: torch.zeros(4, 64, dtype=torch.int32)}), "of dtype 'I32'"),
    "nothing": (lambda t: t.clear(), "holds no tensors"),
    "no matrix": (lambda t: t.update({A: torch.zeros(256)}), "has rank 0"),
    "another whole weight": (
        lambda t: t.update({f"base_model.model.{Q}.weight": torch.zeros(64, 64)}),
        "has another weight than this model",
    ),
    "another vocabulary": (
        lambda t: t.update({"base_model.model.model.embed_tokens.weight": torch.zeros(130, 64)}),
        "another weight than this model",
    ),
}


@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_wrong_tensors(runner: AdaptedRunner, tmp_path: Path, name: str) -> None:
    change, text = WRONG_TENSORS[name]
    message = runner.load(1, write(tmp_path, tensors=changed(change)))
    assert message.error is not None and message.error_type == "ValueError"
    with pytest.raises(ValueError, match=text):
        raise ValueError(message.error)


WRONG_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "prompt tuning": ({"peft_type": "PROMPT_TUNING"}, "peft_type 'PROMPT_TUNING' is not served, only 'LORA'"),
    "no type": ({"peft_type": None}, "peft_type 'None'"),
    "replication": ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication is not served: the model"),
    "single tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices is not served"),
    "PiSSA": ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4.* changes the base model"),
    "unknown": ({"use_the_newest": True}, "'use_the_newest' is not known"),
    "rank": ({"r": 0}, "ranks of at least 1"),
    "rank of another type": ({"r": "4"}, r"Expected `int`, got `str` - at `\$.r`"),
    "alpha": ({"lora_alpha": None}, r"at `\$.lora_alpha`"),
    "bias": ({"bias": "some"}, "bias must be none, all or lora_only"),
    "a large rank": ({"r": 16}, "has rank 4, its configuration says 16"),
    "a pattern": ({"target_modules": "(q_proj"}, "is no regular expression"),
    "a slow pattern": ({"target_modules": "(.|..)*[A-Z]"}, "takes too long"),
    "a slow rank pattern": ({"rank_pattern": {"(.|..)*[A-Z]": 2}}, "takes too long"),
    "many patterns": ({"rank_pattern": {f"x{i}": 2 for i in range(3000)}}, "over 2048 patterns"),
    "a long pattern": ({"target_modules": "x" * 70_000}, "65,536 characters"),
    "a longer context": (
        {"context_length": 300},
        r'300 tokens, and this model has positions for \d+.*hf_overrides={"rope_scaling": ',
    ),
    "a missing whole module": ({"modules_to_save": ["lm_head"]}, "'lm_head' are missing"),
    "an unknown whole module": ({"modules_to_save": ["score"]}, "'score' are missing"),
}


@pytest.mark.parametrize("name", WRONG_CONFIGS)
def test_wrong_configurations(runner: AdaptedRunner, tmp_path: Path, name: str) -> None:
    change, text = WRONG_CONFIGS[name]
    message = runner.load(1, write(tmp_path, CONFIG | change))
    assert message.error is not None and message.error_type == "ValueError"
    with pytest.raises(ValueError, match=text):
        raise ValueError(message.error)


def test_a_rank_over_the_limit(runner: AdaptedRunner, tmp_path: Path) -> None:
    def grow(tensors: Tensors) -> None:
        for name in tensors:
            axis = int("lora_B" in name)
            tensors[name] = torch.cat([tensors[name]] * 4, axis)

    message = runner.load(1, write(tmp_path, CONFIG | {"r": 16}, changed(grow)))
    assert message.error is not None and "rank 16, over max_lora_rank 8" in message.error


def test_missing_files_and_other_than_files(runner: AdaptedRunner, tmp_path: Path) -> None:
    missing = runner.load(1, tmp_path / "none")
    assert (missing.error_type, missing.error) == ("FileNotFoundError", f"'{tmp_path}/none' is no folder")
    folder = write(tmp_path / "adapter")
    (folder / TENSORS).rename(folder / "adapter_model.bin")
    pickled = runner.load(1, folder)
    assert pickled.error is not None and "pickled tensors are read only if" in pickled.error
    (folder / "adapter_model.bin").unlink()
    assert runner.load(1, folder).error == f"'{folder}' has no {TENSORS}"
    os.mkfifo(folder / TENSORS)
    assert runner.load(1, folder).error == f"{TENSORS} is no regular file"
    (folder / "adapter_config.json").unlink()
    assert runner.load(1, folder).error == f"'{folder}' has no adapter_config.json"


def test_a_file_of_a_terabyte_is_refused_at_once(runner: AdaptedRunner, llama: Path, tmp_path: Path) -> None:
    """By what the configuration and the model explain, before anything of it is read; also one to be merged."""
    folder = write(tmp_path / "adapter", CONFIG | {"modules_to_save": ["lm_head"]})
    for size in (1 << 40, 32 << 20):
        os.truncate(folder / TENSORS, size)
        text = rf"{TENSORS} has {size:,} bytes, over the 1\d,\d{{3}},\d{{3}} that its configuration and this model"
        message = runner.load(1, folder)
        assert message.error is not None and message.error_type == "ValueError"
        with pytest.raises(ValueError, match=text):
            raise ValueError(message.error)
        with pytest.raises(LoadError, match=text):
            load_runner(llama, merged_adapter=str(folder))
    os.truncate(folder / "adapter_config.json", 1 << 40)
    assert "over the 1,048,576" in str(runner.load(1, folder).error)


def test_the_limit_of_a_file_follows_from_configuration_and_model(llama: Path) -> None:
    adapters = AdaptedRunner(llama, LIMITS).runner.adapters
    assert isinstance(adapters, Adapters) and adapters._targets is not None
    targets = adapters._targets

    def most(**fields: Any) -> int:
        config = AdapterConfig.parse(json.dumps({"peft_type": "LORA", **fields}).encode())
        return targets.max_file_bytes(config, LIMITS)

    small, large = most(r=1), most(r=8)
    assert small < most(r=1, rank_pattern={"q_proj": 8}) == large == most(r=1000)  # max_lora_rank is 8
    assert most(r=1, modules_to_save=["layers.0.mlp.up_proj"]) == small + 8 * 64 * 100


def test_a_hundred_truncated_files(runner: AdaptedRunner, tmp_path: Path) -> None:
    content = (write(tmp_path / "whole") / TENSORS).read_bytes()
    settings = (tmp_path / "whole" / "adapter_config.json").read_bytes()
    folder = write(tmp_path / "cut")
    for index in range(100):
        (folder / TENSORS).write_bytes(content[: len(content) * index // 100])
        message = runner.load(1, folder)
        assert message.error is not None and message.error_type == "ValueError", index
        assert "cut off" in message.error or "header" in message.error
    (folder / TENSORS).write_bytes(content)
    for index in range(0, len(settings), 20):
        (folder / "adapter_config.json").write_bytes(settings[:index])
        assert runner.load(1, folder).error_type == "ValueError", index


@pytest.mark.timeout(60)
def test_damaged_headers(tmp_path: Path) -> None:
    folder = write(tmp_path)
    content = bytearray((folder / TENSORS).read_bytes())
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])

    def damaged(change: dict[str, Any]) -> None:
        altered = {name: entry | change if name == A else entry for name, entry in header.items()}
        text = json.dumps(altered).encode()
        (folder / TENSORS).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
        with pytest.raises(ValueError, match=TENSORS.replace(".", r"\.") + "|does not take"):
            dict(read_files(folder, b"{}", allow_pickle=False, max_bytes=1 << 23).tensors())

    for change in (
        {"shape": [4, -64]},
        {"shape": [4, 65]},
        {"shape": [2**40, 2**40]},
        {"shape": [127] * 1_000_000},  # whose product takes minutes
        {"data_offsets": [-8, 1016]},
        {"data_offsets": [1 << 60, (1 << 60) + 1024]},
        {"data_offsets": [0]},
        {"dtype": 7},
        {"shape": "all"},
    ):
        damaged(change)


def test_an_adapter_is_loaded_dropped_and_loaded_again(
    runner: AdaptedRunner, llama: Path, tmp_path: Path
) -> None:
    """On the runner whose earlier adapters all failed to load. Other files have another content."""
    folder = write(tmp_path / "adapter")
    loaded = runner.load(3, folder)
    assert loaded.error is None and loaded.rank == 4 and loaded.num_bytes == 4 * 4 * (64 + 64 + 100 + 64)
    prompt = [[5, 6, 7, 8]]
    adapted = Driver(runner.runner).generate(prompt, 6, adapters=[3])
    plain = Driver(runner.runner).generate(prompt, 6)
    assert adapted != plain and plain == Driver(load_runner(llama)[0]).generate(prompt, 6)
    assert runner.load(4, folder, loaded.content).content == loaded.content
    write(folder, CONFIG | {"lora_alpha": 9})
    other = runner.load(5, folder, loaded.content)
    assert other.error is not None and "not those that were loaded under this name" in other.error
    assert runner.load(5, folder).content not in (loaded.content, b"")
    adapters = runner.runner.adapters
    before = adapters.num_bytes
    adapters.drop(DropAdapter(3).index)
    assert adapters.num_bytes < before
    with pytest.raises(RuntimeError, match="adapter 3 was planned, but is not loaded"):
        Driver(runner.runner).generate(prompt, 1, adapters=[3])


def test_an_adapter_dropped_while_it_is_loaded_is_never_there(runner: AdaptedRunner, tmp_path: Path) -> None:
    adapters = runner.runner.adapters
    adapters.load(LoadAdapter(8, str(write(tmp_path))))
    adapters.drop(8)
    assert runner.load(9, tmp_path).error is None  # loaded after it, and the only one reported
    with pytest.raises(RuntimeError, match="adapter 8"):
        Driver(runner.runner).generate([[5]], 1, adapters=[8])


def test_pickled_tensors_through_the_restricted_unpickler(llama: Path, tmp_path: Path) -> None:
    runner = AdaptedRunner(llama, LoRAConfig(allow_pickle=True))
    folder = write(tmp_path / "adapter")
    expected = runner.load(1, folder)
    tensors = load_file(folder / TENSORS)
    (folder / TENSORS).unlink()
    torch.save(tensors, folder / "adapter_model.bin")
    loaded = runner.load(2, folder)
    assert (loaded.error, loaded.num_bytes) == (None, expected.num_bytes)
    prompts = [[5, 6, 7, 8]] * 2
    first, second = Driver(runner.runner).generate(prompts, 6, adapters=[1, 2])
    assert first == second
    torch.save({"x": shutil.rmtree}, folder / "adapter_model.bin")
    refused = runner.load(3, folder)
    assert refused.error is not None and "adapter_model.bin cannot be read" in refused.error


def test_matrices_in_another_dtype(llama: Path, tmp_path: Path) -> None:
    """In the model's own they take its size; in any other they are rounded to it, and held in float32."""
    folder = write(tmp_path)
    found = {}
    for dtype, lora_dtype in (
        ("float32", "auto"),
        ("float32", "bfloat16"),
        ("bfloat16", "auto"),
        ("bfloat16", "float32"),
        ("bfloat16", "float16"),
    ):
        runner = AdaptedRunner(llama, replace(LIMITS, lora_dtype=lora_dtype), dtype=dtype)
        num_bytes = runner.load(1, folder).num_bytes
        params = SamplingParams(temperature=0.0, logprobs=0)
        (request,) = Driver(runner.runner).run([[5, 6, 7]], 1, params, adapters=[1])
        found[dtype, lora_dtype] = num_bytes, request.logprobs
    sizes = [num_bytes for num_bytes, _ in found.values()]
    assert [sizes[0] / size for size in sizes] == [1, 1, 2, 1, 1]
    assert len({str(logprobs) for _, logprobs in found.values()}) == 5


def test_what_cannot_be_served_with_adapters_is_refused(llama: Path) -> None:
    with pytest.raises(LoadError, match="long_lora_scaling_factors are not served"):
        load_runner(llama, lora=replace(LIMITS, long_lora_scaling_factors=[4.0]))


def test_what_runs_as_a_module_is_refused(tmp_path: Path) -> None:
    """Zamba, whose layers share weights, an encoder that runs prompt by prompt, and halves that are modules."""
    for folder in (
        SERVED["zamba"].write(tmp_path / "zamba"),
        pooled.write(tmp_path / "deberta", "deberta-v2"),
    ):
        with pytest.raises(
            LoadError, match="is served without enable_lora: its layers run as transformers' module"
        ):
            AdaptedRunner(folder)
    with pytest.raises(
        LoadError, match=r"enable_lora: adapters change linear layers of stacks alone, and .* halves"
    ):
        AdaptedRunner(SERVED["bailing_hybrid"].write(tmp_path / "ling"))


def test_all_names_together_have_a_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each match takes a tenth of a second by this clock, which is not too long by itself."""
    ticks = itertools.count()
    config = AdapterConfig.parse(
        json.dumps({"peft_type": "LORA", "target_modules": "x.*", "rank_pattern": {"y": 2, "z": 4}}).encode()
    )
    monkeypatch.setattr("pagewire.workers.name_patterns.time.thread_time", lambda: next(ticks) / 10)
    ranks = []
    with pytest.raises(ValueError, match="patterns takes too long in all"):
        for number in range(100):
            ranks.append(config.rank(f"x{number}.z"))
    assert ranks == [4] * len(ranks) and len(ranks) > 20
    with pytest.raises(ValueError, match="patterns takes too long in all"):
        config.targets("x", False)


def test_patterns_are_those_of_peft() -> None:
    config = AdapterConfig.parse(
        json.dumps(
            {
                "peft_type": "LORA",
                "target_modules": ["q_proj"],
                "layers_to_transform": [1, 3],
                "layers_pattern": "h",
            }
        ).encode()
    )
    names = [
        f"model.{layers}.{i}.attn.{leaf}" for layers in ("h", "g") for i in (1, 2) for leaf in ("q_proj", "v")
    ]
    assert [name for name in names if config.targets(name, False)] == ["model.h.1.attn.q_proj"]


def test_a_pattern_as_training_tools_write_it() -> None:
    """It has many repeats, and takes no time nevertheless."""
    parts, leaves = "(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)", "(?:q_proj|v_proj|down_proj)"
    pattern = rf"(?:.*?(?:language|text).*?{parts}.*?{leaves}.*?)"
    pattern += rf"|(?:\bmodel\.layers\.[\d]{{1,}}\.{parts}\.{leaves})"
    config = AdapterConfig.parse(json.dumps({"peft_type": "LORA", "target_modules": pattern}).encode())
    names = [f"model.layers.31.{leaf}" for leaf in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")]
    assert [config.targets(name, False) for name in names] == [True, False, True]
    assert config.targets("model.language_model.layers.0.mlp.down_proj", False)
