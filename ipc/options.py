"""The one definition of the engine's options: defaults, meaning, choices and groups.

`EngineArgs` is what `LLM(...)`, `AsyncLLM.from_engine_args` and the command line fill in, what a frontend
hands to the core it spawns, and what `--help` is made from.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

import msgspec

from pagewire.ipc.bounds import check_int, check_number

DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
KV_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
DTYPE_ALIASES = {"half": "float16", "float": "float32"}


def option(default: Any, group: str, text: str, *, choices: tuple[Any, ...] = (), make: Any = None) -> Any:
    """A field of `EngineArgs` with what `--help` and the checks need."""
    metadata = {"group": group, "help": text, "choices": choices}
    if make is not None:
        return dataclasses.field(default_factory=make, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass
class EngineArgs:
    """Options of an engine.

    Raises:
        ValueError, TypeError: by `check`, for a value that is out of range, of the wrong type, or asks for
            what is not supported yet.
    """

    # fmt: off
    model: str = option("demo", "Model", "model folder, Hugging Face id, or 'demo' (the embedded model)")
    tokenizer: str | None = option(None, "Model", "tokenizer folder or id; default: the model's")
    tokenizer_mode: Literal["auto", "slow"] = option(
        "auto", "Model", "'slow' takes the Python tokenizer of transformers", choices=("auto", "slow"))
    skip_tokenizer_init: bool = option(False, "Model", "no tokenizer: token ids in, token ids out")
    trust_remote_code: bool = option(False, "Model", "run code that comes with the model")
    revision: str | None = option(None, "Model", "branch, tag or commit of the model on the hub")
    tokenizer_revision: str | None = option(None, "Model", "branch, tag or commit of the tokenizer")
    hf_token: str | bool | None = option(None, "Model", "token for the hub; True: the stored one")
    hf_overrides: dict[str, Any] = option(None, "Model", "JSON merged into the model's config", make=dict)
    download_dir: str | None = option(None, "Model", "where downloads go; default: the hub's cache")
    load_format: Literal["auto", "safetensors", "pt", "dummy"] = option(
        "auto", "Model", "'dummy' takes random weights", choices=("auto", "safetensors", "pt", "dummy"))
    dtype: str = option("auto", "Model", "of weights and activations; auto: the checkpoint's", choices=DTYPES)
    max_model_len: int | None = option(None, "Model", "most tokens of prompt and output; default: the model's")
    served_model_name: str | list[str] | None = option(None, "Model", "name(s) in metrics and in the API")
    seed: int = option(0, "Model", "of requests that give none")

    device: str = option("auto", "Device", "'auto', 'cpu' or 'cuda[:N]'")
    num_threads: int | None = option(None, "Device", "worker threads on CPU; default: physical cores")
    enforce_eager: bool = option(False, "Device", "no CUDA graphs (the CPU has none)")

    block_size: int = option(16, "KV cache", "tokens per block", choices=(8, 16, 32, 64, 128))
    kv_cache_dtype: str = option(
        "auto", "KV cache", "of keys and values; auto: the model's; fp8 (e4m3): half of it, on GPUs",
        choices=KV_DTYPES)
    gpu_memory_utilization: float = option(0.9, "KV cache", "share of the device's memory to use, in (0, 1]")
    kv_cache_memory_bytes: int | None = option(None, "KV cache", "bytes of KV memory; overrides the share")
    num_gpu_blocks_override: int | None = option(None, "KV cache", "number of KV blocks; overrides both")
    enable_prefix_caching: bool = option(True, "KV cache", "share KV blocks among equal prefixes")
    swap_space: float = option(4, "KV cache", "accepted, without effect: preemption recomputes")

    max_num_batched_tokens: int = option(2048, "Scheduler", "token budget of one step")
    max_num_seqs: int = option(256, "Scheduler", "most sequences that run at once")
    scheduling_policy: Literal["fcfs", "priority"] = option(
        "fcfs", "Scheduler", "order of requests: first come, or lowest priority value first",
        choices=("fcfs", "priority"))
    async_scheduling: bool = option(True, "Scheduler", "plan a step while another runs")
    max_waiting: int = option(100_000, "Scheduler", "most requests that may wait; more are refused")
    max_logprobs: int = option(20, "Scheduler", "most log probabilities per token; -1: no limit")

    disable_log_stats: bool = option(False, "Logging", "no periodic line of statistics in the core's log")
    log_stats_interval: float = option(10.0, "Logging", "seconds between two such lines")
    otlp_traces_endpoint: str | None = option(
        None, "Logging", "collector that gets a span per request: http://host:4318/v1/traces (OTLP)")
    # fmt: on

    @classmethod
    def from_kwargs(cls, kwargs: Mapping[str, Any]) -> EngineArgs:
        """Build from keyword arguments, and `check`.

        Raises:
            TypeError: an unknown name (the nearest known one is suggested).
            ValueError: a later feature with another value than its default, or a bad value.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        known: dict[str, Any] = {}
        for name, value in kwargs.items():
            name = ALIASES.get(name, name)
            if name in names:
                known[name] = value
            elif name not in NOT_SUPPORTED_YET:
                raise TypeError(unknown_option(name, names | set(NOT_SUPPORTED_YET)))
            elif value not in (None, NOT_SUPPORTED_YET[name]) and value != {}:
                raise ValueError(f"{name}={value!r} is not supported yet")
        args = cls(**known)
        args.check()
        return args

    def check(self) -> None:
        """Raise ValueError or TypeError for the first bad value."""
        check_types(self)
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_waiting"):
            check_int(name, getattr(self, name), 1)
        for name in ("num_threads", "kv_cache_memory_bytes", "num_gpu_blocks_override", "max_model_len"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        check_int("seed", self.seed, 0)
        check_int("max_logprobs", self.max_logprobs, -1)
        check_number("gpu_memory_utilization", self.gpu_memory_utilization, 0.0, 1.0, above=True)
        check_number("log_stats_interval", self.log_stats_interval, 0.1, math.inf)
        check_number("swap_space", self.swap_space, 0.0, math.inf)
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", self.device):
            raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}")

    def resolved_dtype(self) -> str:
        """`dtype` without its aliases."""
        return DTYPE_ALIASES.get(self.dtype, self.dtype)

    def served_names(self) -> list[str]:
        """The names the model goes by, the first being its main one."""
        names = self.served_model_name or self.model
        return [names] if isinstance(names, str) else list(names)


def check_types(options: Any) -> None:
    """Check a dataclass whose fields are made by `option`.

    Raises:
        TypeError: a value of a wrong type. ValueError: one that is no choice.
    """
    hints = get_type_hints(type(options))
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        try:
            msgspec.convert(value, hints[field.name])
        except msgspec.ValidationError as error:
            choices = field.metadata["choices"]
            wanted = f"one of {', '.join(map(repr, choices))}" if choices else str(error)
            kind = ValueError if choices else TypeError
            raise kind(f"{field.name}: {wanted}; got {value!r}") from None
        choices = field.metadata["choices"]
        if choices and value is not None and value not in choices:
            raise ValueError(f"{field.name} must be one of {', '.join(map(str, choices))}, got {value!r}")


AsyncEngineArgs = EngineArgs

ALIASES = {"num_gpu_blocks": "num_gpu_blocks_override", "policy": "scheduling_policy"}

# Options of features that are not there yet, and the value each may have meanwhile.
NOT_SUPPORTED_YET: dict[str, Any] = {
    "runner": "auto",
    "convert": "auto",
    "allowed_local_media_path": "",
    "allowed_media_domains": None,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "distributed_executor_backend": None,
    "quantization": None,
    "cpu_offload_gb": 0,
    "disable_custom_all_reduce": False,
    "mm_processor_kwargs": None,
    "limit_mm_per_prompt": None,
    "pooler_config": None,
    "override_pooler_config": None,
    "structured_outputs_config": None,
    "guided_decoding_backend": None,
    "compilation_config": None,
    "logits_processors": None,
    "enable_chunked_prefill": True,
    "enable_lora": False,
    "max_loras": 1,
    "max_lora_rank": 16,
    "speculative_config": None,
    "speculative_model": None,
    "num_speculative_tokens": None,
    "collect_detailed_traces": None,
    "kv_transfer_config": None,
    "enable_sleep_mode": False,
}


def unknown_option(name: str, names: set[str]) -> str:
    """The message for an option that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    return f"unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def env_float(name: str, default: float) -> float:
    """A number from the environment.

    Raises:
        ValueError: it is not a number.
    """
    text = os.environ.get(name)
    try:
        return default if text is None else float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {text!r}") from None
