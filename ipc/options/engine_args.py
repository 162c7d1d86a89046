"""The engine's options together, and the checks that concern several of them.

`LLM(...)`, `AsyncLLM.from_engine_args` and the command line fill in `EngineArgs`; a frontend passes it to the core
that it spawns; `--help` is generated from it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pagewire.ipc.bounds import check_int, check_number, unknown_name
from pagewire.ipc.compatibility import NAMES, OPTIONS, Absent, settle
from pagewire.ipc.models.own_code import path_of
from pagewire.ipc.models.registrations import checked_path
from pagewire.ipc.options.groups import (
    AdapterOptions,
    CacheOptions,
    DeviceOptions,
    ExtensionOptions,
    LoggingOptions,
    MediaOptions,
    ModelOptions,
    SchedulerOptions,
    SpeculationOptions,
)
from pagewire.ipc.options.option import check_types
from pagewire.ipc.options.structured_outputs import StructuredOutputsConfig
from pagewire.ipc.quantization import quantization_name
from pagewire.ipc.speculative import FLAGS, SpeculativeConfig, speculative_config
from pagewire.ipc.wire.pooling import PoolerConfig

if TYPE_CHECKING:  # frontends attach without it
    import argparse

Parser = TypeVar("Parser", bound="argparse.ArgumentParser")
MAX_RANKS = 1024
ADAPTER_SWITCHES = {  # options without effect unless another one is set
    **dict.fromkeys(
        ("max_loras", "max_lora_rank", "max_cpu_loras", "max_lora_bytes", "lora_dtype"), "enable_lora"
    ),
    **dict.fromkeys(
        ("lora_extra_vocab_size", "lora_allow_pickle", "qlora_adapter_name_or_path"), "enable_lora"
    ),
    **dict.fromkeys(("max_prompt_adapters", "max_prompt_adapter_token"), "enable_prompt_adapter"),
}


# Why KV blocks are kept nowhere else than in memory with an option.
AGAINST_TIER = {
    "enable_prefix_caching": "without it no block is found by others",
    "device": "blocks of a GPU's memory cannot be kept yet",
    "a model that proposes tokens": "its own cache cannot be kept yet; the methods 'ngram' and 'suffix' have none",
    "worker_extension": "it may change the weights, which the blocks depend on",
    "trust_remote_code": "nobody can tell whether another start runs the same code",
    "load_format": "another start has other weights",
}


def absent_option(name: str) -> Absent | None:
    """The table's entry for an option that pagewire does not have, or only as one of the server; else None."""
    return OPTIONS.get(name) or NAMES.get(f"EngineArgs({name})")


class EngineArgsType(type):
    """The type of `EngineArgs`, whose constructor knows vLLM's names as well."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Options from arguments; see `EngineArgs`."""
        names = {field.name for field in dataclasses.fields(EngineArgs)}
        known: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name in ALIASES and value is None:
                continue
            name = ALIASES.get(name, name)
            if name in names:
                known[name] = value
            elif absent := absent_option(name):
                settle(name, value, absent)
            else:
                raise TypeError(unknown_name("option", name, names | OPTIONS.keys()))
        return super().__call__(*args, **known)


@dataclass
class EngineArgs(  # the last base has the first options: dataclasses collect fields from the end
    LoggingOptions,
    ExtensionOptions,
    AdapterOptions,
    SpeculationOptions,
    SchedulerOptions,
    CacheOptions,
    DeviceOptions,
    MediaOptions,
    ModelOptions,
    metaclass=EngineArgsType,
):
    """Options of an engine; call `check` before use.

    Raises:
        TypeError: an unknown name (the text suggests a similar one).
        ValueError: a value of an option that pagewire does not have (`ipc.compatibility`).
    """

    @classmethod
    def from_kwargs(cls, kwargs: Mapping[str, Any]) -> EngineArgs:
        """Checked options from keyword arguments.

        Raises:
            TypeError, ValueError: as the class, or a value is invalid.
        """
        args = cls(**kwargs)
        args.check()
        return args

    @staticmethod
    def add_cli_args(parser: Parser) -> Parser:
        """Add an option for each of these to a program's own parser, with its default; returns the parser.

        vLLM's options that pagewire does not have are among them: `from_cli_args` accepts or refuses their values.
        """
        from pagewire.ipc.options.command_line import add_absent_options, add_options_of, set_defaults_of

        add_options_of(parser, EngineArgs)
        add_absent_options(parser)
        parser.add_argument(
            "--disable-log-requests", action="store_true", help="no effect: an engine logs none"
        )
        set_defaults_of(parser, EngineArgs)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """Checked options from parsed arguments, which may have others besides; see `add_cli_args`.

        Raises:
            TypeError, ValueError: as `from_kwargs`.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        given = vars(args)
        return cls.from_kwargs({name: given[name] for name in given if name in names or absent_option(name)})

    def __post_init__(self) -> None:
        self.dtype = str(self.dtype).removeprefix("torch.")  # torch.bfloat16 is taken for "bfloat16"
        if isinstance(self.quantization, str):
            self.quantization = self.quantization.lower()
        self.pooler_config = msgspec.to_builtins(PoolerConfig.read(self.pooler_config))
        self.structured_outputs_config = msgspec.to_builtins(
            StructuredOutputsConfig.read(self.structured_outputs_config)
        )
        for field in dataclasses.fields(self):
            if field.default_factory is not dataclasses.MISSING and getattr(self, field.name) is None:
                setattr(self, field.name, field.default_factory())
        given: Any = self.logits_processors or []
        self.logits_processors = [path_of(code) for code in (given if isinstance(given, list) else [given])]
        self.worker_extension = path_of(self.worker_extension)

    def check(self) -> None:
        """Validate all values; raises ValueError or TypeError for the first invalid one."""
        if callable(self.hf_overrides):
            raise TypeError(NAMES["LLM(hf_overrides=function)"].refusal("hf_overrides=function"))
        check_types(self)
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_waiting", "num_scheduler_steps"):
            check_int(name, getattr(self, name), 1)
        for name in ("num_threads", "kv_cache_memory_bytes", "num_gpu_blocks_override", "max_model_len"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        if self.max_step_ms is not None:
            check_int("max_step_ms", self.max_step_ms, 0)
        if self.rope_theta is not None:
            check_number("rope_theta", self.rope_theta, 0.0, math.inf, above=True)
        check_int("seed", self.seed, 0)
        check_int("max_prompt_adapters", self.max_prompt_adapters, 1)
        check_int("max_prompt_adapter_token", self.max_prompt_adapter_token, 0)
        check_int("max_logprobs", self.max_logprobs, -1)
        check_number("gpu_memory_utilization", self.gpu_memory_utilization, 0.0, 1.0, above=True)
        check_number("max_retained_share", self.max_retained_share, 0.0, 1.0)
        check_number("log_stats_interval", self.log_stats_interval, 0.1, math.inf)
        if self.quantization is not None:
            quantization_name(self.quantization)
        self.media_limits()
        self._check_scaling_factors()
        if self.resolved_kv_events() is not None and not self.enable_prefix_caching:
            raise ValueError("kv_events needs enable_prefix_caching: without it no block is found by others")
        self._check_parallel()
        self._check_tier()
        self.resolved_speculation()
        self.resolved_processors()
        StructuredOutputsConfig.read(self.structured_outputs_config)
        if self.worker_extension is not None:
            checked_path(self.worker_extension)
        self._check_adapters()
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", self.device):
            raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}")

    def _check_scaling_factors(self) -> None:
        """Refuse scaling factors for a KV cache that has no use for them."""
        if self.quantization_param_path is None:
            return
        reasons = {
            "auto": "its elements are the model's",
            "int8": "it has a scale for each token and head",
            "int4": "it has scales for each token and head",
            "fp8_e5m2": "its range is float16's",
        }
        if self.device == "cpu":
            raise ValueError(
                "quantization_param_path is for a KV cache of fp8, which GPUs have and CPUs do not"
            )
        if reason := reasons.get(self.kv_cache_dtype):
            raise ValueError(
                f"quantization_param_path: a KV cache of {self.kv_cache_dtype} takes no scaling factors, since "
                f"{reason}; kv_cache_dtype='fp8' takes them"
            )

    def _check_tier(self) -> None:
        """Refuse KV blocks elsewhere than in memory where what is kept would not be all, or not what it says."""
        tier = self.resolved_tier()
        default = type(self).__dataclass_fields__["kv_cache_disk"].default
        if self.kv_cache_dir is None and self.kv_cache_disk != default:
            raise ValueError("kv_cache_disk needs kv_cache_dir")
        if self.preemption_mode == "swap" and self.kv_cache_dir is None and not self.resolved_swap_bytes():
            raise ValueError(
                "preemption_mode='swap' needs swap_space or kv_cache_dir, which blocks are copied to"
            )
        if tier is None:
            return
        if self.kv_cache_dir == "":
            raise ValueError("kv_cache_dir: the name of a folder expected")
        speculation = self.resolved_speculation()
        drafts = "a model that proposes tokens"
        outlives = {  # obstacles to blocks that other engines find, but not to swap space
            "enable_prefix_caching=False": not self.enable_prefix_caching,
            f"device={self.device!r}": self.device.startswith("cuda"),
            "worker_extension": self.worker_extension is not None,
            "trust_remote_code": self.trust_remote_code,
            "load_format='dummy'": self.load_format == "dummy",
        }
        reasons = {drafts: speculation is not None and not speculation.in_core}
        names = [name for name in ("kv_cache_dir", "kv_peers") if getattr(self, name) is not None]
        if names:
            reasons |= outlives
        if self.kv_peers is not None:
            self.resolved_kv_peers()
            if self.num_workers > 1:
                raise ValueError(
                    f"kv_peers does not go with {self.parallel_sizes}: each worker has its part of a block, and "
                    "parts do not go to other cores yet; cores of one machine can share a kv_cache_dir"
                )
        if (obstacle := next((name for name, applies in reasons.items() if applies), None)) is not None:
            name = names[0] if names else "swap_space"
            raise ValueError(f"{name} does not go with {obstacle}: {AGAINST_TIER[obstacle.split('=')[0]]}")

    def _check_parallel(self) -> None:
        """Refuse options of groups of workers that contradict each other."""
        check_int("tensor_parallel_size", self.tensor_parallel_size, 1, MAX_RANKS)
        check_int("pipeline_parallel_size", self.pipeline_parallel_size, 1, MAX_RANKS)
        check_int("tensor_parallel_size * pipeline_parallel_size", self.num_workers, 1, MAX_RANKS)
        if self.max_parallel_loading_workers is not None:
            check_int("max_parallel_loading_workers", self.max_parallel_loading_workers, 1)
        if self.worker_use_ray and self.distributed_executor_backend not in (None, "ray"):
            raise ValueError(
                f"worker_use_ray contradicts distributed_executor_backend={self.distributed_executor_backend!r}"
            )
        if self.ray_workers_use_nsight and not self.uses_ray:
            raise ValueError("ray_workers_use_nsight needs distributed_executor_backend='ray'")
        for name in ("join_address", "join_key"):
            if getattr(self, name) is not None and self.distributed_executor_backend != "join":
                raise ValueError(f"{name} needs distributed_executor_backend='join'")
        if self.num_workers > 1 and self.device.startswith("cuda:"):
            raise ValueError(
                f"device={self.device!r} is one GPU, and {self.parallel_sizes} takes {self.num_workers}: use "
                "device='cuda', and CUDA_VISIBLE_DEVICES to choose among them"
            )

    def _check_adapters(self) -> None:
        """Refuse options of adapters that contradict each other."""
        for name in ("max_loras", "max_lora_rank", "max_lora_bytes"):
            check_int(name, getattr(self, name), 1)
        check_int("lora_extra_vocab_size", self.lora_extra_vocab_size, 0)
        if self.max_cpu_loras is not None:
            check_int("max_cpu_loras", self.max_cpu_loras, self.max_loras)
        if self.merge != (self.lora_path is not None):
            raise ValueError(
                "lora_path and merge=True go together: the adapter is added to the weights; to keep adapters apart "
                "from them, set enable_lora and give lora_request with each request"
            )
        if self.merge and self.enable_lora:
            raise ValueError(
                "merge=True is for a single adapter: leave enable_lora out, or lora_path and merge"
            )
        for field in dataclasses.fields(self):
            switch = ADAPTER_SWITCHES.get(field.name, "")
            if switch and not getattr(self, switch) and getattr(self, field.name) != field.default:
                raise ValueError(f"{field.name} needs {switch}")
        uses_bitsandbytes = "bitsandbytes" in (self.quantization, self.load_format)
        if self.qlora_adapter_name_or_path is not None and not uses_bitsandbytes:
            raise ValueError("qlora_adapter_name_or_path needs quantization='bitsandbytes'")

    def resolved_speculation(self) -> SpeculativeConfig | None:
        """The configuration of speculative decoding; None without any.

        Raises:
            ValueError: a bad option.
        """
        flags = {name: getattr(self, name) for name in FLAGS}
        config = speculative_config(flags, self.speculative_config, self.tensor_parallel_size)
        if config is not None and not config.in_core and self.pipeline_parallel_size > 1:
            raise ValueError(
                "a model that proposes tokens is not supported yet with pipeline_parallel_size over 1, since it "
                "would run in the last stage alone, while the others wait: use the methods 'ngram' or 'suffix', "
                "which need no model"
            )
        if config is not None and self.enable_lora and not config.in_core:
            raise ValueError(
                "a model that proposes tokens knows no adapters, so enable_lora does not go with it: use the "
                "methods 'ngram' or 'suffix', which do"
            )
        return config


AsyncEngineArgs = EngineArgs

ALIASES = {
    "num_gpu_blocks": "num_gpu_blocks_override",
    "policy": "scheduling_policy",
    "override_pooler_config": "pooler_config",
    "worker_extension_cls": "worker_extension",
}
