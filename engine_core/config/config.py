"""The core's configuration, resolved once from the options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagewire.engine_core.adapters.adapter import AdapterLimits
from pagewire.engine_core.config.rotary import rotary_overrides
from pagewire.engine_core.config.scaling_factors import read_scaling_factors
from pagewire.engine_core.config.speculative_model import resolve_speculation
from pagewire.engine_core.retention.promises import RetentionLimits
from pagewire.engine_core.schedule.scheduler import SchedulerConfig
from pagewire.ipc.counts import check_counts
from pagewire.ipc.families.media import MediaFamily, has_processor, media_family
from pagewire.ipc.files.adapter_files import adapter_folder, adapter_version
from pagewire.ipc.files.hub import model_folder
from pagewire.ipc.files.model_configs import read_configs
from pagewire.ipc.models.architectures import pools
from pagewire.ipc.models.plugins import load_allowed_plugins
from pagewire.ipc.models.registrations import all_registrations
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.positions import longest_sequence, too_long
from pagewire.ipc.quantization import resolve_quantization, settings_of
from pagewire.ipc.speculative import SpeculativeConfig
from pagewire.ipc.wire.embeddings import EmbeddingsInfo
from pagewire.ipc.wire.lora import MAX_ADAPTER_ID, AdapterSource
from pagewire.ipc.wire.media import MediaInfo
from pagewire.ipc.wire.messages import EngineInfo
from pagewire.ipc.wire.params import max_n
from pagewire.ipc.wire.pooling import PoolerConfig
from pagewire.ipc.wire.tier_messages import TierConfig
from pagewire.ipc.wire.worker_messages import Parallel, Ready, WorkerConfig

CPU_STEP_SECONDS, GPU_STEP_SECONDS = 0.2, 0.05  # of a step, unless an option says otherwise
LAYER_PARTITION = "PAGEWIRE_PP_LAYER_PARTITION"


@dataclass(frozen=True)
class EngineConfig:
    """The options, the model's folder or GGUF file, and its generation settings.

    generation_config: content of generation_config.json. eos_token_id: the main end-of-sequence token.
    kv_scales: the scaling factors of `quantization_param_path`, one for each layer.
    speculation: what proposes tokens, with its model's folder; None if nothing does.
    merged_adapter: folder of the adapter that is added to the weights; None for none.
    first_adapter: the adapter that is loaded at the start; None for none.
    overrides: what is merged into config.json: `hf_overrides`, and those of the rotary embedding.
    plugins: names of those that are loaded. pools: the options or the architecture say so; a worker may find more
    in the model's files. media: how the model takes pictures and sound; None: it takes none.
    """

    args: EngineArgs
    model_path: Path
    generation_config: dict[str, Any]
    eos_token_id: int | None
    kv_scales: tuple[float, ...] = ()
    speculation: SpeculativeConfig | None = None
    merged_adapter: Path | None = None
    first_adapter: AdapterSource | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    pools: bool = False
    media: MediaFamily | None = None

    @classmethod
    def resolve(cls, args: EngineArgs) -> EngineConfig:
        """The configuration for `args`; downloads the model if necessary.

        Raises:
            ValueError, TypeError: a bad option, such as the revision of a local folder, a length over the model's,
                a quantisation that is not the checkpoint's, or a bad file of scaling factors; or a plugin that must
                be loaded fails.
            ModelNotFoundError: no such model.
        """
        args.check()
        plugins = load_allowed_plugins()
        layer_partition(args.pipeline_parallel_size)
        path = model_folder(
            args.model,
            revision=args.revision,
            token=args.hf_token,
            cache_dir=args.download_dir,
            load_format=args.load_format,
            trust_remote_code=args.trust_remote_code,
            ignore_patterns=args.ignore_patterns,
        )
        model, generation = read_configs(path, args.trust_remote_code)
        rotary = rotary_overrides(model | args.hf_overrides, args.rope_scaling, args.rope_theta)
        overrides = args.hf_overrides | rotary
        model |= overrides
        check_counts(model)
        if (why := too_long(args.max_model_len, longest_sequence(model))) is not None:
            raise ValueError(why)
        resolve_quantization(args.quantization, args.load_format, settings_of(path, model))
        factors = args.quantization_param_path
        kv_scales = () if factors is None else tuple(read_scaling_factors(Path(factors), model))
        speculation = resolve_speculation(args, model)
        eos = end_of_sequence(model, generation)
        return cls(
            args,
            path,
            generation,
            eos,
            kv_scales,
            speculation,
            merged_adapter=merged_adapter(args),
            first_adapter=first_adapter(args),
            overrides=overrides,
            plugins=plugins,
            pools=pools_by_name(args, model),
            media=taken_media(args, path, model),
        )

    @property
    def eos_token_ids(self) -> list[int]:
        """All end-of-sequence tokens in the model's configuration files, the main one first."""
        ids = [] if self.eos_token_id is None else [self.eos_token_id]
        more = self.generation_config.get("eos_token_id")
        ids += more if isinstance(more, list) else [] if more is None else [more]
        return list(dict.fromkeys(ids))

    @property
    def prepares_grammars(self) -> bool:
        """True if the tokenizer of grammars is loaded at the start, so that the first one need not wait for it."""
        return not self.pools and not self.args.skip_tokenizer_init

    def tokenizer_folder(self) -> Path:
        """The folder or GGUF file of the tokenizer, downloaded if necessary; the model's own unless `tokenizer` or
        `tokenizer_revision` is set.

        Raises:
            ModelNotFoundError: no such tokenizer. ValueError: a revision of a local folder.
        """
        args = self.args
        if args.tokenizer is None and args.tokenizer_revision is None:
            return self.model_path
        return model_folder(
            args.tokenizer or args.model,
            revision=args.tokenizer_revision,
            token=args.hf_token,
            cache_dir=args.download_dir,
            tokenizer_only=True,
        )

    def worker_config(self) -> WorkerConfig:
        """The message that makes a worker load the model."""
        args = self.args
        return WorkerConfig(
            model_path=str(self.model_path),
            dtype=args.resolved_dtype(),
            device=args.device,
            load_format=args.load_format,
            allowed_save_path=args.allowed_save_path,
            trust_remote_code=args.trust_remote_code,
            hf_overrides=dict(self.overrides),
            max_model_len=args.max_model_len,
            disable_sliding_window=args.disable_sliding_window,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            block_size=args.block_size,
            gpu_memory_utilization=args.gpu_memory_utilization,
            kv_cache_memory_bytes=args.kv_cache_memory_bytes,
            num_blocks=args.num_gpu_blocks_override,
            num_threads=args.num_threads,
            enforce_eager=args.enforce_eager,
            kv_cache_dtype=args.kv_cache_dtype,
            quantization=args.quantization,
            weight_cache=args.weight_cache,
            kv_scales=list(self.kv_scales),
            parallel=Parallel(
                size=args.num_workers,
                stages=args.pipeline_parallel_size,
                layers=layer_partition(args.pipeline_parallel_size),
                shared_memory=not args.disable_custom_all_reduce,
                max_loading=args.max_parallel_loading_workers or 0,
            ),
            runner=args.runner,
            convert=args.convert,
            pooler_config=PoolerConfig.read(args.pooler_config),
            speculative=self.speculation,
            lora=args.lora_config(),
            merged_adapter="" if self.merged_adapter is None else str(self.merged_adapter),
            registrations=all_registrations(self.plugins),
            logits_processors=args.resolved_processors(),
            worker_extension=args.worker_extension or "",
            media=self.media is not None,
            batch_invariant=args.batch_invariant,
            tier=self.tier,
        )

    @property
    def tier(self) -> TierConfig | None:
        """Where KV blocks are kept beside the KV cache; None if nowhere."""
        return self.args.resolved_tier()

    def adapter_limits(self, ready: Ready) -> AdapterLimits | None:
        """How many LoRA adapters there may be; None if none are served."""
        args, lora = self.args, self.args.lora_config()
        if lora is None:
            return None
        max_resident = max(lora.max_loras, lora.max_cpu_loras or args.max_num_seqs)
        return AdapterLimits(lora.max_loras, max_resident, args.max_lora_bytes, ready.vocab_size)

    def scheduler_config(self, ready: Ready) -> SchedulerConfig:
        """The scheduler's limits, given the KV blocks that the worker has allocated.

        A prompt of an encoder has no KV cache, and runs in one step. One block, of any size, stands for it.
        The stages of a pipeline run different steps at the same time, which share the budget of tokens: so a long
        prompt keeps all of them busy, too.

        Raises:
            ValueError: the blocks of an encoder are to be published, or tokens proposed for a model that pools.
        """
        if self.speculation is not None and ready.pooling is not None:
            raise ValueError(
                "speculative_config: this model pools and generates no tokens: leave the option out"
            )
        args, whole = self.args, ready.pooling is not None and ready.pooling.whole_prompts
        stages = args.pipeline_parallel_size
        depth = max(2, stages) if args.async_scheduling else 1
        if whole and args.resolved_kv_events() is not None:
            raise ValueError(
                "kv_events: this model is an encoder, which has no KV cache: leave the option out"
            )
        return SchedulerConfig(
            num_blocks=ready.num_blocks,
            block_size=ready.max_model_len if whole else args.block_size,
            max_model_len=ready.max_model_len,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=max(
                args.max_num_batched_tokens // min(stages, depth), ready.max_model_len if whole else 1
            ),
            policy=args.scheduling_policy,
            depth=depth,
            stages=stages,
            launch_steps=self._launch_steps(ready),
            step_seconds=self._step_seconds(ready) / min(stages, depth),
        )

    def retention_limits(self, config: SchedulerConfig, num_states: int) -> RetentionLimits:
        """How much of the KV cache may be promised to stay cached."""
        args = self.args
        return RetentionLimits.of(
            config, num_states, args.max_retained_share, caches=args.enable_prefix_caching
        )

    def _step_seconds(self, ready: Ready) -> float:
        """The seconds that a step with prompts may take while others wait for a token; 0: any.

        In a pipeline a sequence is in one of as many steps as there are stages, which share this time, too.
        """
        if self.args.max_step_ms is not None:
            return self.args.max_step_ms / 1000
        return CPU_STEP_SECONDS if ready.device == "cpu" else GPU_STEP_SECONDS

    def _launch_steps(self, ready: Ready) -> int:
        """The most steps that one plan is for: several where one worker on a CPU samples all tokens by itself.

        A GPU gets the next step while one runs, and states have a slot for each plan.
        """
        args = self.args
        alone = args.num_workers == 1 and self.speculation is None
        plain = ready.device == "cpu" and ready.pooling is None and not ready.num_states
        return args.num_scheduler_steps if alone and plain and args.async_scheduling else 1

    def engine_info(self, ready: Ready, media: MediaInfo | None = None) -> EngineInfo:
        """The description of the engine that every frontend gets when it attaches. media: that it takes."""
        args = self.args
        return EngineInfo(
            model=args.model,
            model_path=str(self.model_path),
            tokenizer=args.tokenizer or (args.model if args.tokenizer_revision else str(self.model_path)),
            tokenizer_revision=args.tokenizer_revision,
            served_model_names=args.served_names(),
            architecture=ready.architecture,
            dtype=ready.dtype,
            device=ready.device,
            vocab_size=ready.vocab_size,
            max_model_len=ready.max_model_len,
            block_size=args.block_size,
            num_blocks=ready.num_blocks,
            num_states=ready.num_states,
            max_num_seqs=args.max_num_seqs,
            max_logprobs=args.max_logprobs,
            max_n=max_n(),
            seed=args.seed,
            eos_token_id=self.eos_token_id,
            generation_config=self.generation_config,
            trust_remote_code=args.trust_remote_code,
            tokenizer_mode=args.tokenizer_mode,
            skip_tokenizer_init=args.skip_tokenizer_init,
            startup_seconds=ready.startup_seconds,
            scheduling_policy=args.scheduling_policy,
            figures=ready.figures,
            pooling=ready.pooling,
            lora=args.lora_config(),
            tensor_parallel_size=args.tensor_parallel_size,
            pipeline_parallel_size=args.pipeline_parallel_size,
            max_num_batched_tokens=self.scheduler_config(ready).max_num_batched_tokens,
            embeddings=self.embeddings_info(ready),
            short_length=ready.short_length,
            logits_processors=[source.name for source in args.resolved_processors() if source.name],
            source=ready.source,
            media=media if ready.source is None else ready.source.media,
        )

    def embeddings_info(self, ready: Ready) -> EmbeddingsInfo:
        """The embeddings that prompts may bring.

        Raises:
            ValueError: options say that prompts bring some, but the model takes none.
        """
        args, size = self.args, ready.embedding_size
        if args.enable_prompt_embeds or args.enable_prompt_adapter:
            name = "enable_prompt_embeds" if args.enable_prompt_embeds else "enable_prompt_adapter"
            if args.enable_prompt_adapter and ready.pooling is not None:
                raise ValueError(
                    "enable_prompt_adapter: this model pools, and prompt adapters are to generate"
                )
            if not size:
                raise ValueError(
                    f"{name}: {ready.architecture} looks its tokens up in a way of its own, so no embeddings can "
                    "take their place"
                )
        return EmbeddingsInfo(
            size=size,
            prompts=args.enable_prompt_embeds,
            adapters=args.enable_prompt_adapter,
            max_adapters=args.max_prompt_adapters,
            max_adapter_tokens=args.max_prompt_adapter_token,
        )


def pools_by_name(args: EngineArgs, model: dict[str, Any]) -> bool:
    """True if the options or the architecture's name say that the model pools. model: content of config.json."""
    if args.runner == "auto" and args.convert in ("auto", "none"):
        names = model.get("architectures")
        return isinstance(names, list) and any(isinstance(name, str) and pools(name) for name in names)
    return args.runner != "generate"


def taken_media(args: EngineArgs, path: Path, model: dict[str, Any]) -> MediaFamily | None:
    """How a model takes pictures and sound; None if it takes none, has no processor, or is to take none.

    Raises:
        ValueError: it takes none, and its processor is to have arguments.
    """
    family, limits = media_family(model), args.media_limits()
    if family is None or all(limits.get(kind) == 0 for kind in family.kinds) or not has_processor(path):
        if args.mm_processor_kwargs:
            raise ValueError("mm_processor_kwargs: the engine takes no pictures or sounds")
        return None
    return family


def layer_partition(num_stages: int) -> tuple[int, ...]:
    """The number of layers of each stage in `PAGEWIRE_PP_LAYER_PARTITION`; empty without it, or for one stage.

    Raises:
        ValueError: it is no list of as many positive numbers.
    """
    text = os.environ.get(LAYER_PARTITION)
    if not text or num_stages == 1:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != num_stages or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(
            f"{LAYER_PARTITION}={text!r}: the number of layers of each of {num_stages} stages expected "
            f"(pipeline_parallel_size), such as {','.join(['8'] * num_stages)}"
        )
    return tuple(map(int, parts))


def end_of_sequence(model: dict[str, Any], generation: dict[str, Any]) -> int | None:
    """The main end-of-sequence token in config.json, else in generation_config.json; None if neither has one."""
    for config in (model, model.get("text_config") or {}, generation):
        ids = config.get("eos_token_id")
        if isinstance(ids, list) and ids:
            ids = ids[0]
        if isinstance(ids, int):
            return ids
    return None


def merged_adapter(args: EngineArgs) -> Path | None:
    """The folder of the adapter that is added to the weights, downloaded if necessary; None for none.

    Raises:
        ModelNotFoundError: there is no such adapter.
    """
    if args.lora_path is None:
        return None
    return adapter_folder(args.lora_path, token=args.hf_token, cache_dir=args.download_dir)


def first_adapter(args: EngineArgs) -> AdapterSource | None:
    """The adapter that is loaded at the start, downloaded if necessary; None for none.

    Raises:
        ModelNotFoundError: there is no such adapter.
    """
    name = args.qlora_adapter_name_or_path
    if name is None:
        return None
    folder = adapter_folder(name, token=args.hf_token, cache_dir=args.download_dir)
    return AdapterSource(name, MAX_ADAPTER_ID, str(folder), adapter_version(folder))
