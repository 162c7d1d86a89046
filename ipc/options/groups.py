"""The engine's options by topic: defaults, help texts and choices. `EngineArgs` is all of them together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from pagewire.ipc.bounds import check_int, check_number
from pagewire.ipc.files.hub import IGNORED_FILES
from pagewire.ipc.files.names import short_name
from pagewire.ipc.models.own_code import ProcessorSource, processor_sources
from pagewire.ipc.options.option import option
from pagewire.ipc.quantization import FAMILIES, ONLINE
from pagewire.ipc.quoting import quoted
from pagewire.ipc.sizes import size_in_bytes
from pagewire.ipc.wire.budget import MAX_MEDIA
from pagewire.ipc.wire.kv_events import KVEventsConfig, kv_events_config
from pagewire.ipc.wire.lora import LoRAConfig
from pagewire.ipc.wire.sockets import check_address
from pagewire.ipc.wire.tier_messages import TierConfig

DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
KV_DTYPES = ("auto", "int8", "int4", "fp8", "fp8_e4m3", "fp8_e5m2")
DTYPE_ALIASES = {"half": "float16", "float": "float32", "fp8": "fp8_e4m3"}
BACKENDS = ("mp", "ray", "join")
MAX_PEERS = 32  # of a core: each is asked for every prompt
SWAP_BYTES = 4 << 30  # of swap space where preemption_mode asks for some: vLLM's default


# Groups give no objects of their own: without their methods, a frontend attaches 2 ms sooner.
@dataclass(init=False, repr=False, eq=False)
class ModelOptions:
    """Which model is served, where its files are, and how they are read."""

    model: str = option(
        "demo",
        "Model",
        "model folder, Hugging Face id, s3://bucket/folder, or an embedded model ('demo'; 'demo-vision' sees)",
    )
    runner: Literal["auto", "generate", "pooling"] = option(
        "auto",
        "Model",
        "what the model does; auto: what its architecture and its files say",
        choices=("auto", "generate", "pooling"),
    )
    convert: Literal["auto", "none", "embed", "classify", "reward"] = option(
        "auto",
        "Model",
        "what a model that pools makes of a prompt; auto: as its architecture says",
        choices=("auto", "none", "embed", "classify", "reward"),
    )
    pooler_config: dict[str, Any] = option(
        None,
        "Model",
        "JSON of pooling_type (LAST, MEAN, CLS, STEP), normalize, dimensions, activation, ..., in "
        "place of what the checkpoint says",
        make=dict,
    )
    tokenizer: str | None = option(None, "Model", "tokenizer folder or id; default: the model's")
    tokenizer_mode: Literal["auto", "slow"] = option(
        "auto", "Model", "'slow': use the Python tokenizer of transformers", choices=("auto", "slow")
    )
    skip_tokenizer_init: bool = option(False, "Model", "load no tokenizer: token ids in, token ids out")
    trust_remote_code: bool = option(
        False,
        "Model",
        "let the Python code in the model's repository run where nothing else serves the model",
    )
    revision: str | None = option(None, "Model", "branch, tag or commit of the model on the hub")
    tokenizer_revision: str | None = option(
        None, "Model", "branch, tag or commit of the tokenizer on the hub; default: the model's"
    )
    hf_token: str | bool | None = option(None, "Model", "access token for the hub; True: the stored one")
    hf_overrides: dict[str, Any] = option(
        None, "Model", "JSON merged into the model's config.json", make=dict
    )
    rope_scaling: dict[str, Any] = option(
        None,
        "Model",
        'JSON of a scaling of the rotary embedding, such as {"rope_type": "yarn", "factor": 4.0}; '
        "hf_overrides gives the model more positions (max_position_embeddings)",
        make=dict,
    )
    rope_theta: float | None = option(
        None, "Model", "base of the rotary embedding's angles; default: the model's"
    )
    download_dir: str | None = option(None, "Model", "folder for downloads; default: the hub's cache")
    ignore_patterns: str | list[str] = option(
        None,
        "Model",
        "files of the hub's repository not to download, such as other forms of the same weights "
        f"(default: {' '.join(IGNORED_FILES)})",
        make=lambda: list(IGNORED_FILES),
    )
    load_format: Literal["auto", "safetensors", "gguf", "bitsandbytes", "pt", "dummy", "sharded_state"] = (
        option(
            "auto",
            "Model",
            "auto: .safetensors files, or the GGUF file that is named or alone in the folder; "
            "safetensors, gguf: these only; bitsandbytes: as quantization=; pt: .bin files (pickles); "
            "dummy: random weights; sharded_state: each worker's part, as save_sharded_state has written it",
            choices=("auto", "safetensors", "gguf", "bitsandbytes", "pt", "dummy", "sharded_state"),
        )
    )
    allowed_save_path: str = option(
        "",
        "Model",
        "folder, on the workers' machines, below which save_sharded_state may write, for any frontend with the "
        "right of control; default: nowhere, but a program's LLM with a core of its own may write anywhere",
    )
    weights_dir: str | None = option(
        None,
        "Model",
        "folder below which update_weights reads safetensors files, for any frontend with the right of control; no "
        "link in it is followed; default: none, so that weights come from frontends alone",
    )
    quantization: str | None = option(
        None,
        "Model",
        "how weights are quantised; default: as the checkpoint is, with which a name must agree: "
        f"{', '.join(FAMILIES)}; of plain numbers while loading: {', '.join(ONLINE)} (int4 has an output layer of "
        "6 bits, int4_int8 of 8); of a quantised checkpoint: dequantize, which makes plain numbers, so that CPUs "
        "do not round activations to 8 bits",
        short="-q",
    )
    weight_cache: bool = option(
        True, "Model", "keep packed weights on disk, for a faster next start ($PAGEWIRE_CACHE_ROOT/weights)"
    )
    dtype: str = option(
        "auto",
        "Model",
        "type of weights and activations; auto: the checkpoint's, but for float32: float16 on GPUs, bfloat16 on "
        "CPUs that multiply it (AVX512-BF16, AMX, ARM with BF16)",
        choices=DTYPES,
    )
    max_model_len: int | None = option(
        None, "Model", "maximum tokens of prompt and output together; default: the model's limit"
    )
    disable_sliding_window: bool = option(
        False,
        "Model",
        "serve up to the model's smallest attention window, within which every token sees all before it",
    )
    served_model_name: str | list[str] | None = option(
        None,
        "Model",
        "name(s) of the model in metrics and in the API, of which all but the first may be patterns, such as "
        "'claude-*'; default: the name of its folder or GGUF file, without the path and the ending, or "
        "owner/repository of the hub",
    )
    seed: int = option(0, "Model", "default seed for requests without one")

    def served_names(self) -> list[str]:
        """The names of the model in the API; metrics use the first.

        Raises:
            ValueError: the first is a pattern.
        """
        given = self.served_model_name or short_name(self.model)
        names = [given] if isinstance(given, str) else list(given)
        if "*" in names[0] and self.served_model_name:
            raise ValueError(f"served_model_name: the first must be a name, not the pattern {names[0]!r}")
        return names

    def resolved_dtype(self) -> str:
        """`dtype` with aliases resolved: "half" is "float16"."""
        return DTYPE_ALIASES.get(self.dtype, self.dtype)


@dataclass(init=False, repr=False, eq=False)
class MediaOptions:
    """Options: places from which prompts may have pictures and sounds."""

    allowed_local_media_path: str = option(
        "",
        "Media",
        "folder below which file: URLs of pictures and sounds may be read, by any client; default: nowhere",
    )
    allowed_media_domains: list[str] | None = option(
        None,
        "Media",
        "hosts (example.org, *.example.org) from which alone pictures and sounds are fetched, and networks "
        "(10.0.0.0/8) of which addresses may be used though they are not public; default: any host with a public "
        "address",
    )
    limit_mm_per_prompt: dict[str, int] | str | None = option(
        None,
        "Media",
        'pictures and sounds in a prompt at most: image=16,audio=2, or JSON {"image": 16}; 0: none are taken, and '
        "nothing is loaded for them (default: 1 of each kind)",
    )
    mm_processor_kwargs: dict[str, Any] = option(
        None,
        "Media",
        "JSON of arguments for the model's processor of pictures and sounds, such as "
        '{"size": {"longest_edge": 768}}; a request may give others',
        make=dict,
    )

    def media_limits(self) -> dict[str, int]:
        """The most media of each kind in a prompt, as far as they are given.

        Raises:
            ValueError: it is neither JSON nor a list of kind=number, or a number is not from 0 to `MAX_MEDIA`.
        """
        given = self.limit_mm_per_prompt or {}
        if isinstance(given, str):
            try:
                if given.lstrip().startswith("{"):
                    given = msgspec.json.decode(given, type=dict[str, int])
                else:
                    pairs = (pair.split("=") for pair in given.split(","))
                    given = {name.strip(): int(number) for name, number in pairs}
            except ValueError:
                raise ValueError(
                    f'limit_mm_per_prompt: image=16,audio=2 or {{"image": 16}} expected, got {quoted(given)}'
                ) from None
        for name, number in given.items():
            check_int(f"limit_mm_per_prompt: {quoted(name)}", number, 0, MAX_MEDIA)
        return given


@dataclass(init=False, repr=False, eq=False)
class DeviceOptions:
    """The devices of the workers, and how the model is divided over them."""

    device: str = option("auto", "Device", "'auto' (a GPU if there is one), 'cpu' or 'cuda[:N]'")
    num_threads: int | None = option(
        None, "Device", "threads of each worker on CPU; default: its share of the physical cores"
    )
    enforce_eager: bool = option(False, "Device", "do not use CUDA graphs (no effect on CPUs)")
    batch_invariant: bool = option(
        False,
        "Device",
        "on a GPU, no bit of an output depends on what else runs, or on how a prompt was cut; slower (always so on "
        "CPUs)",
    )

    tensor_parallel_size: int = option(
        1, "Parallel", "number of workers over which each layer of the model is split", short="-tp"
    )
    pipeline_parallel_size: int = option(
        1,
        "Parallel",
        "number of stages, each of tensor_parallel_size workers, that have some of the layers each "
        "($PAGEWIRE_PP_LAYER_PARTITION) and run different steps at the same time",
        short="-pp",
    )
    distributed_executor_backend: str | None = option(
        None,
        "Parallel",
        "how workers are started; mp: as processes of this machine; ray: in a Ray cluster; "
        "join: by `pagewire worker --join` on any machine; default: mp where the machine has enough "
        "devices, else ray",
        choices=BACKENDS,
    )
    join_address: str | None = option(
        None,
        "Parallel",
        "tcp://HOST:PORT to which workers join; default: $PAGEWIRE_HOST_IP, else 127.0.0.1, and "
        "$PAGEWIRE_PORT, else 5710",
    )
    join_key: str | None = option(
        None,
        "Parallel",
        "file with the key of the workers that join, made if it does not exist; default: "
        "join.key in the folder of this user's sockets",
    )
    max_parallel_loading_workers: int | None = option(
        None, "Parallel", "workers of a machine that load weights at the same time; default: all"
    )
    disable_custom_all_reduce: bool = option(
        False,
        "Parallel",
        "exchange tensors between CPU workers of one machine through gloo, not through shared memory",
    )
    worker_use_ray: bool = option(False, "Parallel", "the same as distributed_executor_backend='ray'")
    ray_workers_use_nsight: bool = option(
        False, "Parallel", "profile workers in a Ray cluster with Nsight Systems"
    )

    @property
    def num_workers(self) -> int:
        """Number of worker processes that run the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def uses_ray(self) -> bool:
        """True if the options say that workers run in a Ray cluster."""
        return self.worker_use_ray or self.distributed_executor_backend == "ray"

    @property
    def has_local_worker(self) -> bool:
        """True if there is one worker, which the core starts on its own machine."""
        return (
            self.num_workers == 1 and self.distributed_executor_backend in (None, "mp") and not self.uses_ray
        )

    @property
    def parallel_sizes(self) -> str:
        """The options that make several workers, for messages."""
        names = ("tensor_parallel_size", "pipeline_parallel_size")
        return ", ".join(f"{name}={size}" for name in names if (size := getattr(self, name)) > 1)


@dataclass(init=False, repr=False, eq=False)
class CacheOptions:
    """The KV cache: its size, its element type and the events that it publishes."""

    block_size: int = option(16, "KV cache", "tokens per block", choices=(8, 16, 32, 64, 128))
    kv_cache_dtype: str = option(
        "auto",
        "KV cache",
        "type of keys and values; auto: the model's; in half the memory: int8 (CPUs), "
        "fp8 or fp8_e4m3, fp8_e5m2 (GPUs); in a third, less exact: int4 (CPUs)",
        choices=KV_DTYPES,
    )
    quantization_param_path: str | None = option(
        None,
        "KV cache",
        "JSON file of scaling factors for a KV cache of fp8 (e4m3), one for each layer; "
        "default: the checkpoint's, else 1",
    )
    gpu_memory_utilization: float = option(
        0.9, "KV cache", "fraction of the device's memory to use, in (0, 1]"
    )
    kv_cache_memory_bytes: int | None = option(
        None, "KV cache", "bytes of KV memory; overrides gpu_memory_utilization"
    )
    num_gpu_blocks_override: int | None = option(
        None, "KV cache", "number of KV blocks; overrides both options above"
    )
    enable_prefix_caching: bool = option(True, "KV cache", "reuse KV blocks of equal prompt prefixes")
    max_retained_share: float = option(
        0.25,
        "KV cache",
        "fraction of the KV blocks that requests may have kept for a time (cache_control, "
        "prompt_cache_retention, session_id), in [0, 1]; all tenants together",
    )
    kv_cache_dir: str | None = option(
        None,
        "KV cache",
        "folder on disk for KV blocks that the cache evicts, and for all of them when the engine ends: prefixes "
        "are read from there, also after a restart, and by other engines of the same model; CPUs only",
    )
    kv_cache_disk: str = option(
        "20GiB", "KV cache", "the most that kv_cache_dir may hold, such as 500MiB or 20GiB"
    )
    swap_space: float | None = option(
        None,
        "KV cache",
        "host memory of each worker in GiB (pinned for a GPU) for KV blocks that the cache evicts, such as those "
        "of preempted requests: they are copied back if that is quicker than computing; on a CPU, "
        "kv_cache_memory_bytes makes more of the same memory (default: 0; 4 with preemption_mode swap)",
    )
    preemption_mode: Literal["auto", "swap", "recompute"] | None = option(
        None,
        "KV cache",
        "how preempted requests get back what the cache has lost of them: swap, from swap_space or kv_cache_dir; "
        "recompute, by computing it; auto: by what is quicker (default: auto)",
        choices=("auto", "swap", "recompute"),
    )
    kv_peers: str | None = option(
        None,
        "KV cache",
        "addresses of other cores of this model, separated by commas: prefixes that they have cached are fetched "
        "from there if that is quicker than computing, and this core gives them its own; over tcp:// beyond "
        "loopback with the certificate of this core, which all of them have; CPUs only",
    )
    kv_events: str | None = option(
        None,
        "KV cache",
        "publish which blocks are cached in vLLM's format, at ipc:///PATH (for this user) or tcp://HOST:PORT",
    )
    kv_events_config: dict[str, Any] = option(
        None,
        "KV cache",
        "more about this, with vLLM's names: endpoint, replay_endpoint, topic, buffer_steps, "
        "hwm; also bind, form (array or map), open_to_network",
        make=dict,
    )

    def resolved_kv_dtype(self, model_dtype: str) -> str:
        """The type of keys and values: the model's for "auto"; "fp8" is "fp8_e4m3"."""
        if self.kv_cache_dtype == "auto":
            return model_dtype
        return DTYPE_ALIASES.get(self.kv_cache_dtype, self.kv_cache_dtype)

    def resolved_preemption(self) -> Literal["auto", "swap", "recompute"]:
        """How preempted sequences come back: by copying, computing, or what is quicker."""
        return self.preemption_mode or "auto"

    def resolved_swap_bytes(self) -> int:
        """Bytes of swap space of each worker; 0: there is none.

        Raises:
            ValueError: a bad size.
        """
        if self.swap_space is None:
            return SWAP_BYTES if self.preemption_mode == "swap" and self.kv_cache_dir is None else 0
        check_number("swap_space", self.swap_space, 0.0, math.inf)
        return int(self.swap_space * (1 << 30))

    def resolved_tier(self) -> TierConfig | None:
        """Where KV blocks are kept beside the KV cache; None if nowhere.

        Raises:
            ValueError: a bad size.
        """
        num_bytes = size_in_bytes("kv_cache_disk", self.kv_cache_disk)
        lends, swap_bytes = self.kv_peers is not None, self.resolved_swap_bytes()
        if self.kv_cache_dir is not None:
            folder = str(Path(self.kv_cache_dir).expanduser().absolute())
            return TierConfig(folder, num_bytes, lends, swap_bytes)
        return TierConfig(lends=lends, swap_bytes=swap_bytes) if lends or swap_bytes else None

    def resolved_kv_peers(self) -> list[str]:
        """The addresses of the cores from which blocks are fetched.

        Raises:
            ValueError: one is no address, or stands twice; there are too many.
        """
        if self.kv_peers is None:
            return []
        addresses = [address.strip() for address in self.kv_peers.split(",")]
        if len(set(addresses)) < len(addresses):
            raise ValueError("kv_peers: the same address twice")
        if len(addresses) > MAX_PEERS:
            raise ValueError(f"kv_peers: {len(addresses)} addresses; at most {MAX_PEERS} can be asked")
        try:
            return [check_address(address) for address in addresses]
        except ValueError as error:
            raise ValueError(f"kv_peers: {error}") from None

    def resolved_kv_events(self) -> KVEventsConfig | None:
        """Where and how KV events are published; None if they are not.

        Raises:
            ValueError: a bad option.
        """
        return kv_events_config(self.kv_events, self.kv_events_config)


@dataclass(init=False, repr=False, eq=False)
class SchedulerOptions:
    """How many requests run and wait, and in which order."""

    max_num_batched_tokens: int = option(2048, "Scheduler", "maximum tokens computed in one step")
    max_step_ms: int | None = option(
        None,
        "Scheduler",
        "milliseconds that a step with prompts may take while others wait for their next token: prompts take more "
        "steps then; 0: no limit (default: 200 on CPUs, 50 on GPUs; 0 of an `LLM`)",
    )
    max_num_seqs: int = option(256, "Scheduler", "maximum sequences that run at once")
    scheduling_policy: Literal["fcfs", "priority"] = option(
        "fcfs",
        "Scheduler",
        "order of waiting requests: first come, first served, or lowest priority value first",
        choices=("fcfs", "priority"),
    )
    async_scheduling: bool = option(True, "Scheduler", "plan the next step while one runs")
    num_scheduler_steps: int = option(
        32,
        "Scheduler",
        "maximum steps that a worker on a CPU runs by itself while nothing can change between them",
    )
    max_waiting: int = option(
        100_000, "Scheduler", "maximum sequences that may wait; further requests are refused"
    )
    while_asleep: Literal["wait", "refuse"] = option(
        "wait",
        "Scheduler",
        "a request that comes while the engine sleeps (`sleep`) waits until it is woken, or is refused: by the "
        "server with status 503 and Retry-After",
        choices=("wait", "refuse"),
    )
    structured_outputs_config: dict[str, Any] = option(
        None,
        "Scheduler",
        "JSON of disable_any_whitespace, disable_additional_properties: for every request with a JSON schema",
        make=dict,
    )
    max_logprobs: int = option(20, "Scheduler", "maximum log probabilities per token; -1: no limit")


@dataclass(init=False, repr=False, eq=False)
class SpeculationOptions:
    """Options of speculative decoding; see `ipc.speculative`."""

    speculative_config: dict[str, Any] = option(
        None,
        "Speculation",
        "JSON of method (ngram, suffix, draft_model, mlp_speculator, eagle3, mtp), model, "
        "num_speculative_tokens, prompt_lookup_max, prompt_lookup_min, disable_by_batch_size, max_model_len, "
        "quantization, revision, draft_tensor_parallel_size, acceptance_method, posterior_threshold, "
        "posterior_alpha",
        make=dict,
    )
    speculative_model: str | None = option(
        None,
        "Speculation",
        "model folder, file or id that proposes tokens, or '[ngram]': look up in the sequence "
        "what followed its last tokens before; outputs stay the same, see spec_decoding_acceptance_method",
    )
    num_speculative_tokens: int | None = option(
        None, "Speculation", "most tokens that are proposed at a time; how many are is decided by what pays"
    )
    ngram_prompt_lookup_max: int | None = option(
        None, "Speculation", "most tokens that are looked up with [ngram] (default: 5)"
    )
    ngram_prompt_lookup_min: int | None = option(
        None, "Speculation", "least tokens that are looked up with [ngram] (default: 2)"
    )
    speculative_disable_by_batch_size: int | None = option(
        None, "Speculation", "propose nothing while more sequences than this run or wait; default: as it pays"
    )
    speculative_max_model_len: int | None = option(
        None, "Speculation", "propose nothing for sequences of more tokens than this"
    )
    speculative_model_quantization: str | None = option(
        None, "Speculation", "as quantization, of the model that proposes tokens"
    )
    speculative_draft_tensor_parallel_size: int | None = option(
        None,
        "Speculation",
        "workers over which the model that proposes tokens is divided: tensor_parallel_size "
        "(the default, where it can be divided), or 1: every worker has the whole of it",
        short="-spec-draft-tp",
    )
    spec_decoding_acceptance_method: str | None = option(
        None,
        "Speculation",
        "rejection_sampler (default): a proposed token counts if it is the sampled one; "
        "typical_acceptance_sampler: also if it is likely enough, so that more of them count, but outputs that are "
        "not greedy depend on what is proposed: the same seed may give other tokens in another batch or after a "
        "restart",
        choices=("rejection_sampler", "typical_acceptance_sampler"),
    )
    typical_acceptance_sampler_posterior_threshold: float | None = option(
        None,
        "Speculation",
        "for typical_acceptance_sampler: a proposed token of at least this probability counts "
        "(default: 0.09)",
    )
    typical_acceptance_sampler_posterior_alpha: float | None = option(
        None,
        "Speculation",
        "for typical_acceptance_sampler: one of at least this, times exp(-entropy of the next "
        "token), counts as well (default: root of the threshold, 0.3)",
    )


@dataclass(init=False, repr=False, eq=False)
class AdapterOptions:
    """LoRA adapters, prompt adapters and prompts that are embeddings."""

    enable_lora: bool = option(False, "Adapters", "serve LoRA adapters beside the model")
    max_loras: int = option(1, "Adapters", "maximum adapters whose requests run at the same time")
    max_lora_rank: int = option(
        16, "Adapters", "largest rank of an adapter; smaller ones take no more than theirs"
    )
    max_cpu_loras: int | None = option(
        None, "Adapters", "maximum adapters in memory, at least max_loras; default: max_num_seqs"
    )
    max_lora_bytes: int = option(
        2 << 30,
        "Adapters",
        "bytes of memory for adapters, those of all workers together; the least recently used "
        "are dropped first",
    )
    lora_dtype: Literal["auto", "float16", "bfloat16", "float32"] = option(
        "auto",
        "Adapters",
        "type of adapters' weights; auto: the model's",
        choices=("auto", "float16", "bfloat16", "float32"),
    )
    lora_extra_vocab_size: int = option(
        256, "Adapters", "maximum tokens that an adapter may add to the vocabulary"
    )
    lora_allow_pickle: bool = option(
        False,
        "Adapters",
        "read adapter_model.bin where there is no adapter_model.safetensors: a pickle, of which "
        "tensors only are taken",
    )
    qlora_adapter_name_or_path: str | None = option(
        None,
        "Adapters",
        "folder or Hugging Face id of a QLoRA adapter, for quantization=bitsandbytes: loaded "
        "at the start, kept in memory, and registered under this name",
    )
    lora_path: str | None = option(
        None,
        "Adapters",
        "folder or Hugging Face id of an adapter that is merged into the weights: with merge",
    )
    merge: bool = option(False, "Adapters", "add the adapter of lora_path to the weights as they are loaded")
    enable_prompt_embeds: bool = option(
        False, "Embeddings", "take prompts that are embeddings in place of tokens (prompt_embeds)"
    )
    enable_prompt_adapter: bool = option(
        False,
        "Embeddings",
        "take prompt adapters: learned embeddings before a prompt (prompt_adapter_request)",
    )
    max_prompt_adapters: int = option(
        1,
        "Embeddings",
        "prompt adapters that each frontend keeps in memory; a batch may have any number of them",
    )
    max_prompt_adapter_token: int = option(
        0, "Embeddings", "most virtual tokens of a prompt adapter; 0: as many as the model takes"
    )

    def lora_config(self) -> LoRAConfig | None:
        """The limits of adapters; None if none are served."""
        if not self.enable_lora:
            return None
        return LoRAConfig(
            max_loras=self.max_loras,
            max_lora_rank=self.max_lora_rank,
            max_cpu_loras=self.max_cpu_loras,
            lora_dtype=self.lora_dtype,
            extra_vocab_size=self.lora_extra_vocab_size,
            allow_pickle=self.lora_allow_pickle,
        )


@dataclass(init=False, repr=False, eq=False)
class ExtensionOptions:
    """Code of one's own that the workers run (`ipc.models.own_code`)."""

    logits_processors: str | list[str] = option(
        None,
        "Extensions",
        "import paths of logits processors, which the workers import: module:Class applies to all requests, "
        "NAME=module:Class to those that ask for NAME",
        make=list,
    )
    worker_extension: str | None = option(
        None,
        "Extensions",
        "import path, module:Class, of methods of workers that collective_rpc calls by name",
    )

    def resolved_processors(self) -> tuple[ProcessorSource, ...]:
        """The logits processors of the engine.

        Raises:
            ValueError: a bad path or name.
        """
        given = self.logits_processors
        return processor_sources([given] if isinstance(given, str) else given)


@dataclass(init=False, repr=False, eq=False)
class LoggingOptions:
    """Statistics and traces."""

    disable_log_stats: bool = option(False, "Logging", "do not log periodic statistics in the core")
    log_stats_interval: float = option(10.0, "Logging", "seconds between two lines of statistics")
    otlp_traces_endpoint: str | None = option(
        None, "Logging", "send one span per request to this OTLP collector: http://host:4318/v1/traces"
    )
