from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from pagewire.ipc.environment import env_float
from pagewire.ipc.options.engine_args import AsyncEngineArgs, EngineArgs
from pagewire.ipc.wire.lora import LoRAConfig

DEFAULTS = {
    "model": "demo",
    "tokenizer": None,
    "tokenizer_mode": "auto",
    "skip_tokenizer_init": False,
    "trust_remote_code": False,
    "revision": None,
    "tokenizer_revision": None,
    "hf_token": None,
    "hf_overrides": {},
    "download_dir": None,
    "load_format": "auto",
    "dtype": "auto",
    "max_model_len": None,
    "served_model_name": None,
    "seed": 0,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "distributed_executor_backend": None,
    "disable_custom_all_reduce": False,
    "block_size": 16,
    "gpu_memory_utilization": 0.9,
    "kv_cache_memory_bytes": None,
    "num_gpu_blocks_override": None,
    "enable_prefix_caching": True,
    "enforce_eager": False,
    "scheduling_policy": "fcfs",
    "max_logprobs": 20,
    "disable_log_stats": False,
}


def test_defaults() -> None:
    args = EngineArgs.from_kwargs({})
    assert {name: getattr(args, name) for name in DEFAULTS} == DEFAULTS
    assert AsyncEngineArgs is EngineArgs


def test_every_option_has_a_group_and_a_text() -> None:
    for field in dataclasses.fields(EngineArgs):
        assert field.metadata["group"] and field.metadata["help"], field.name


def test_mutable_defaults_are_not_shared() -> None:
    EngineArgs().hf_overrides["a"] = 1
    assert EngineArgs().hf_overrides == {}
    assert EngineArgs(hf_overrides=None).hf_overrides == {}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("max_model_length", "max_model_len"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("tensor_paralel_size", "tensor_parallel_size"),
    ],
)
def test_the_error_for_a_misspelt_option_names_the_nearest(name: str, near: str) -> None:
    with pytest.raises(TypeError, match=f"unknown option '{name}'; did you mean '{near}'?"):
        EngineArgs.from_kwargs({name: 1})


def test_an_option_like_no_other() -> None:
    with pytest.raises(TypeError) as caught:
        EngineArgs.from_kwargs({"zzzzzz": 1})
    assert str(caught.value) == "unknown option 'zzzzzz'"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be in"),
        ({"max_parallel_loading_workers": 0}, "max_parallel_loading_workers must be"),
        (
            {"distributed_executor_backend": "slurm"},
            "distributed_executor_backend must be one of mp, ray, join, got 'slurm'",
        ),
        ({"distributed_executor_backend": "mp", "worker_use_ray": True}, "worker_use_ray contradicts .*'mp'"),
        ({"ray_workers_use_nsight": True}, "ray_workers_use_nsight needs distributed_executor_backend='ray'"),
        ({"join_address": "tcp://127.0.0.1:1"}, "join_address needs distributed_executor_backend='join'"),
        ({"tensor_parallel_size": 2, "device": "cuda:1"}, "device='cuda:1' is one GPU"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be in"),
        ({"pipeline_parallel_size": 2, "device": "cuda:1"}, "and pipeline_parallel_size=2 takes 2"),
        (
            {"tensor_parallel_size": 64, "pipeline_parallel_size": 32},
            r"tensor_parallel_size \* pipeline_parallel_size must be in \[1, 1024\], got 2048",
        ),
    ],
)
def test_options_of_groups_that_cannot_be(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        EngineArgs.from_kwargs(options)


def test_a_number_of_workers_is_an_integer() -> None:
    with pytest.raises(TypeError, match="tensor_parallel_size"):
        EngineArgs.from_kwargs({"tensor_parallel_size": True})


def test_aliases() -> None:
    args = EngineArgs.from_kwargs({"num_gpu_blocks": 7, "policy": "priority"})
    assert (args.num_gpu_blocks_override, args.scheduling_policy) == (7, "priority")


CHOICES: dict[str, tuple[Any, ...]] = {
    "tokenizer_mode": ("auto", "slow"),
    "distributed_executor_backend": ("mp", "ray", "join"),
    "load_format": ("auto", "safetensors", "gguf", "bitsandbytes", "pt", "dummy"),
    "dtype": ("auto", "half", "float16", "bfloat16", "float", "float32"),
    "block_size": (8, 16, 32, 64, 128),
    "scheduling_policy": ("fcfs", "priority"),
}


@pytest.mark.parametrize("name", sorted(CHOICES))
def test_choices(name: str) -> None:
    for value in CHOICES[name]:
        assert getattr(EngineArgs.from_kwargs({name: value}), name) == value
    for value in ("other", 7):
        with pytest.raises(ValueError, match=name):
            EngineArgs.from_kwargs({name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", None),
        ("model", 5),
        ("tokenizer", 5),
        ("skip_tokenizer_init", "yes"),
        ("trust_remote_code", 1),
        ("rope_theta", "x"),
        ("rope_scaling", 2.0),
        ("hf_token", 5),
        ("hf_overrides", [1]),
        ("max_model_len", "2048"),
        ("max_model_len", 1.5),
        ("served_model_name", 5),
        ("served_model_name", [5]),
        ("seed", "0"),
        ("seed", True),
        ("device", 0),
        ("num_threads", "4"),
        ("gpu_memory_utilization", "0.9"),
        ("enable_prefix_caching", None),
        ("max_num_seqs", 1.5),
    ],
)
def test_values_of_another_type_are_named(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=name):
        EngineArgs.from_kwargs({name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, 0)
            for name in (
                "max_num_batched_tokens",
                "max_num_seqs",
                "max_waiting",
                "num_scheduler_steps",
                "max_model_len",
            )
        ),
        *((name, -1) for name in ("num_threads", "kv_cache_memory_bytes", "num_gpu_blocks_override", "seed")),
        ("seed", 2**63),
        ("max_model_len", 2**63),
        ("max_logprobs", -2),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.1),
        ("gpu_memory_utilization", math.nan),
        ("log_stats_interval", 0),
        ("log_stats_interval", math.nan),
    ],
)
def test_values_out_of_range_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        EngineArgs.from_kwargs({name: value})


def test_edges_of_the_ranges() -> None:
    EngineArgs.from_kwargs(
        {
            "gpu_memory_utilization": 1,
            "max_logprobs": -1,
            "seed": 2**63 - 1,
            "num_threads": 1,
        }
    )


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:12"])
def test_devices(device: str) -> None:
    assert EngineArgs.from_kwargs({"device": device}).device == device


@pytest.mark.parametrize("device", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "0", "cuda:\u00b2", "cpu:0"])
def test_no_devices(device: str) -> None:
    with pytest.raises(ValueError, match="device must be auto, cpu, cuda or cuda:N"):
        EngineArgs.from_kwargs({"device": device})


@pytest.mark.parametrize(
    ("dtype", "resolved"),
    [("half", "float16"), ("float", "float32"), ("auto", "auto"), ("bfloat16", "bfloat16")],
)
def test_aliases_of_dtypes(dtype: str, resolved: str) -> None:
    assert EngineArgs(dtype=dtype).resolved_dtype() == resolved


@pytest.mark.parametrize(
    ("served", "names"), [(None, ["demo"]), ("a", ["a"]), (["a", "b"], ["a", "b"]), ([], ["demo"])]
)
def test_served_names(served: Any, names: list[str]) -> None:
    assert EngineArgs.from_kwargs({"served_model_name": served}).served_names() == names


def test_numbers_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEWIRE_TEST_NUMBER", raising=False)
    assert env_float("PAGEWIRE_TEST_NUMBER", 1.5) == 1.5
    monkeypatch.setenv("PAGEWIRE_TEST_NUMBER", "3")
    assert env_float("PAGEWIRE_TEST_NUMBER", 1.5) == 3.0
    monkeypatch.setenv("PAGEWIRE_TEST_NUMBER", "soon")
    with pytest.raises(ValueError, match="PAGEWIRE_TEST_NUMBER must be a number, got 'soon'"):
        env_float("PAGEWIRE_TEST_NUMBER", 1.5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_loras": 0}, "max_loras must be at least 1"),
        ({"max_loras": 4, "max_cpu_loras": 3}, "max_cpu_loras must be at least 4"),
        ({"lora_dtype": "int8"}, "lora_dtype"),
        ({"lora_path": "/adapter"}, "lora_path and merge=True go together"),
        ({"merge": True}, "lora_path and merge=True go together"),
        ({"lora_path": "/a", "merge": True, "enable_lora": True}, "merge=True is for a single adapter"),
        ({"qlora_adapter_name_or_path": "/a"}, "needs enable_lora"),
        (
            {"lora_path": "/a", "merge": True, "lora_allow_pickle": True},
            "lora_allow_pickle needs enable_lora",
        ),
        ({"max_loras": 4}, "max_loras needs enable_lora"),
        ({"max_lora_rank": 64, "enable_prompt_adapter": True}, "max_lora_rank needs enable_lora"),
        ({"max_cpu_loras": 4}, "max_cpu_loras needs enable_lora"),
        (
            {"max_prompt_adapter_token": 9, "enable_lora": True},
            "max_prompt_adapter_token needs enable_prompt_adapter",
        ),
        ({"qlora_adapter_name_or_path": "/a", "enable_lora": True}, "needs quantization='bitsandbytes'"),
    ],
)
def test_options_of_adapters_that_contradict_each_other(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        EngineArgs.from_kwargs(options)


def test_the_limits_of_adapters() -> None:
    assert EngineArgs().lora_config() is None
    limits = EngineArgs(enable_lora=True, max_loras=4, max_lora_rank=64, lora_allow_pickle=True).lora_config()
    assert limits == LoRAConfig(max_loras=4, max_lora_rank=64, allow_pickle=True)
    assert EngineArgs(enable_lora=True).max_loras == 1  # as documented
