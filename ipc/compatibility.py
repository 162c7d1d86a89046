"""The names of vLLM that pagewire knows and does not have: why, and what does their work.

One table, by kind of name: options, variables, request fields and attributes are looked up here, and
docs/compatibility.md is made of it (`python -m pagewire.cli.compatibility`). What gets built leaves the table.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import UnionType
from typing import TYPE_CHECKING, Any

import msgspec

from pagewire.ipc.errors import FieldValueError
from pagewire.ipc.quoting import quoted

logger = logging.getLogger("pagewire")


class Absent(msgspec.Struct, frozen=True, gc=False):
    """Why a name is absent, and which of its values are accepted all the same.

    reason: why pagewire does not have it. instead: what does its work, or what to write.
    silent: values that ask for what happens anyway; so do None, {} and [].
    warned: values, or their type, that are accepted with one warning: they change no output and no promise.
    pending: it is to be built.
    """

    reason: str
    instead: str
    silent: tuple[Any, ...] = ()
    warned: tuple[Any, ...] | type | UnionType = ()
    pending: bool = False

    def warns_of(self, value: Any) -> bool:
        """True if the value is accepted with a warning."""
        return value in self.warned if isinstance(self.warned, tuple) else isinstance(value, self.warned)

    def refusal(self, subject: str) -> str:
        """The error message for a name or a value that is refused."""
        return f"{subject} is not supported{' yet' * self.pending}: {self.reason}; {self.instead}"

    def warning(self, subject: str) -> str:
        """The message for a name or a value that is accepted without effect."""
        return f"{subject} has no effect: {self.reason}; {self.instead}"


def settle(subject: str, value: Any, absent: Absent) -> None:
    """Accept a value of an absent name, silently or with one warning per process; or raise as `needs_warning`."""
    if needs_warning(subject, value, absent):
        warn_once(subject, absent.warning(f"{subject}={quoted(value)}"))


def needs_warning(subject: str, value: Any, absent: Absent) -> bool:
    """True if a value of an absent name is accepted with a warning, False if silently.

    subject: the name, for messages.

    Raises:
        ValueError: the value would have an effect; the text has the reason and the alternative.
    """
    if value in (None, {}, [], *absent.silent):
        return False
    if not absent.warns_of(value):
        raise FieldValueError(subject, absent.refusal(f"={quoted(value)}"))
    return True


def refuse_value(option: str, value: Any) -> None:
    """Refuse a value of an option that pagewire does not have.

    Raises:
        ValueError: it is in `VALUES`.
    """
    if isinstance(value, str) and (absent := VALUES.get(f"{option}={value}")):
        raise FieldValueError(option, absent.refusal(f"={value!r}"))


def warn_once(name: str, message: str) -> None:
    """Log a warning, unless there was one of this name in this process."""
    if name not in _warned:
        _warned.add(name)
        logger.warning("%s", message)


_warned: set[str] = set()


class KnowsArguments(msgspec.StructMeta):
    """Type of structs that may be made with vLLM's arguments: those in `NAMES` are dropped or refused."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (the class is a type)
        """A struct; see `settle`."""
        for name in [name for name in kwargs if f"{cls.__name__}({name})" in NAMES]:
            absent, value = NAMES[f"{cls.__name__}({name})"], kwargs.pop(name)
            settle(name, value, absent)
        return super().__call__(*args, **kwargs)


def absent_name(module: str, name: str) -> AttributeError:
    """The error for a name that a module does not have, with the reason, if vLLM has it.

    Imports of the name do not show it: what they say is raised by the finder of modules in `pagewire`.
    """
    full = f"{module}.{name}"
    if (absent := NAMES.get(full)) is None:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    return AttributeError(absent.refusal(full))


class _KnowsClassAttributes(type):
    if not TYPE_CHECKING:  # type checkers shall go on to find attributes that do not exist

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            for name in kwargs:
                if absent := NAMES.get(f"{cls.__name__}({name})"):
                    raise TypeError(absent.refusal(f"{cls.__name__}({name}=...)"))
            return super().__call__(*args, **kwargs)

        def __getattr__(cls, name: str) -> Any:
            raise absent_attribute(cls, name, f"type object {cls.__name__!r} has no attribute {name!r}")


class KnowsAttributes(metaclass=_KnowsClassAttributes):
    """Base of classes whose AttributeError says of an attribute of vLLM why they do not have it."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            kind = type(self)
            raise absent_attribute(kind, name, f"{kind.__name__!r} object has no attribute {name!r}")


def absent_attribute(kind: type, name: str, message: str) -> AttributeError:
    """The error for an attribute that a class does not have. message: if it is not in `NAMES` either."""
    for owner in kind.__mro__:
        full = f"{owner.__name__}.{name}"
        if absent := NAMES.get(full):
            return AttributeError(absent.refusal(full))
    return AttributeError(message)


OPTIONS: Mapping[str, Absent] = {
    "api_server_count": Absent(
        "a server is one process",
        "start `pagewire serve --attach ADDRESS` several times, on one core",
        silent=(1,),
    ),
    "code_revision": Absent(
        "the code of a repository is that of its revision, and runs with trust_remote_code only",
        "give revision, or a local folder with other code",
    ),
    "collect_detailed_traces": Absent(
        "a request's span has its time in the queue, in prefill and in decoding in any case",
        "start_profile and stop_profile trace the workers",
    ),
    "compilation_config": Absent(
        "kernels are written ahead, and torch.compile is not used",
        "enforce_eager=True turns CUDA graphs off",
        silent=(0,),
        warned=int | dict,
    ),
    "cpu_offload_gb": Absent(
        "weights stay on their device",
        "quantization='int8' or 'int4' makes them smaller, and tensor_parallel_size divides them",
        silent=(0,),
        pending=True,
    ),
    "data_parallel_size": Absent(
        "an engine has one copy of its model",
        "`pagewire route --spawn N` runs several engines behind one address",
        silent=(1,),
    ),
    "disable_async_output_proc": Absent(
        "outputs are made in the frontend, which is a process of its own",
        "async_scheduling=False plans a step only when the one before it has ended",
        silent=(False,),
        warned=(True,),
    ),
    "disable_frontend_multiprocessing": Absent(
        "the engine core is always a process of its own",
        "it ends with its frontend, and --attach uses one that runs already",
        silent=(False,),
        warned=(True,),
    ),
    "disable_logprobs_during_spec_decoding": Absent(
        "drafts never change what a request gets with its tokens, log probabilities included",
        "a request that asks for no logprobs pays for none",
        silent=(False,),
        warned=(True,),
    ),
    "enable_chunked_prefill": Absent(
        "prompts are always computed in chunks, beside the requests that run",
        "max_num_batched_tokens is the size of a step",
        silent=(True,),
        warned=(False,),
    ),
    "enable_sleep_mode": Absent("every engine can sleep", "leave the option out", silent=(True, False)),
    "engine_use_ray": Absent(
        "the engine core is a process of its own without Ray",
        "distributed_executor_backend='ray' runs its workers in a cluster",
        silent=(False,),
        warned=(True,),
    ),
    "fully_sharded_loras": Absent(
        "it would save 15 MB of 57 on each of two workers for an adapter of rank 16 of an 8B model, and each layer "
        "would exchange data six times, not twice",
        "larger matrices are divided already",
        silent=(False,),
    ),
    "generation_config": Absent(
        "default sampling parameters are those of the model's generation_config.json",
        "give SamplingParams, or the fields of a request",
        silent=("auto",),
    ),
    "guided_decoding_backend": Absent(
        "all grammars are compiled by llguidance",
        "it serves the same JSON schemas, regular expressions, choices and grammars",
        silent=("auto", "guidance", "llguidance"),
        warned=("outlines", "lm-format-enforcer", "xgrammar"),
    ),
    "kv_transfer_config": Absent(
        "engines do not exchange KV blocks",
        "`pagewire route` sends a request to where its prefix is cached",
        pending=True,
    ),
    "long_lora_scaling_factors": Absent(
        "all requests of an engine have one rotary embedding and one max_model_len",
        "serve such an adapter in an engine of its own, with rope_scaling and max_position_embeddings of "
        "hf_overrides",
    ),
    "max_context_len_to_capture": Absent(
        "CUDA graphs are recorded for any length",
        "enforce_eager=True turns them off",
        silent=(8192,),
        warned=int,
    ),
    "max_seq_len_to_capture": Absent(
        "CUDA graphs are recorded for any length",
        "enforce_eager=True turns them off",
        silent=(8192,),
        warned=int,
    ),
    "model_loader_extra_config": Absent(
        "no load format takes further options", "load_format, quantization and hf_overrides say all there is"
    ),
    "num_lookahead_slots": Absent(
        "each step gets the KV slots of its drafts",
        "num_speculative_tokens limits the drafts",
        silent=(0,),
        warned=int,
    ),
    "override_neuron_config": Absent("Neuron devices are not served", "use device='cuda' or 'cpu'"),
    "override_generation_config": Absent(
        "default sampling parameters are those of the model's generation_config.json",
        "give SamplingParams, or the fields of a request",
    ),
    "scheduler_delay_factor": Absent(
        "a step ends in time while requests wait for a token, however long the prompts are that it computes",
        "max_step_ms is that time, and max_num_batched_tokens the most tokens of a step",
        silent=(0,),
        warned=int | float,
    ),
    "task": Absent("it is two options", "runner='pooling' and convert='embed', for one", silent=("auto",)),
    "tokenizer_pool_extra_config": Absent(
        "texts are tokenized in threads of their frontend",
        "several frontends can share an engine",
        warned=dict,
    ),
    "tokenizer_pool_size": Absent(
        "texts are tokenized in threads of their frontend",
        "several frontends can share an engine",
        silent=(0,),
        warned=int,
    ),
    "tokenizer_pool_type": Absent(
        "texts are tokenized in threads of their frontend",
        "several frontends can share an engine",
        silent=("ray",),
        warned=object,
    ),
    "use_v2_block_manager": Absent(
        "there is one manager of KV blocks, which does what vLLM's second one does",
        "leave the option out",
        silent=(True,),
        warned=(False,),
    ),
}
"""Options of an engine or a server, by keyword; on the command line they have dashes."""

VALUES: Mapping[str, Absent] = {
    "device=hpu": Absent("Gaudi devices are not served", "use 'cuda' or 'cpu'"),
    "device=neuron": Absent("Neuron devices are not served", "use 'cuda' or 'cpu'"),
    "device=openvino": Absent("OpenVINO is not used", "'cpu' has kernels of its own for x86 and ARM"),
    "device=tpu": Absent("TPUs are not served", "use 'cuda' or 'cpu'"),
    "device=xpu": Absent("Intel GPUs are not served", "use 'cuda' or 'cpu'"),
    "distributed_executor_backend=external_launcher": Absent(
        "each of its processes is an engine of its own",
        "with 'join', processes that torchrun or another launcher has started (`pagewire worker --join`) are the "
        "workers of one engine",
    ),
    "load_format=npcache": Absent(
        "no second copy of the weights is kept in NumPy's format",
        "convert the checkpoint to safetensors, or read it with 'pt': packed weights are cached (weight_cache)",
    ),
    "load_format=tensorizer": Absent(
        "safetensors files are mapped into memory, so no other format is needed to load them fast",
        "use 'auto'; for several workers, save_sharded_state and 'sharded_state'",
    ),
    "quantization=deepspeedfp": Absent(
        "it needs the GPU kernels of DeepSpeed", "'fp8' quantises weights while they are loaded as well"
    ),
    "quantization=gptq_marlin_24": Absent(
        "in its layout 2 of 4 weights are left out, which no kernel here reads",
        "take a 'gptq' or 'compressed-tensors' checkpoint of the model",
    ),
    "quantization=neuron_quant": Absent(
        "Neuron devices are not served", "'int8' quantises weights while they are loaded"
    ),
    "quantization=qqq": Absent(
        "its layout belongs to kernels with 4-bit weights and 8-bit activations of one GPU library",
        "take a 'compressed-tensors' or 'gptq' checkpoint of the model",
    ),
    "quantization=tpu_int8": Absent("TPUs are not served", "'int8' quantises weights while they are loaded"),
    "speculative_method=custom_class": Absent(
        "a class by name is code, which no option may bring", "take one of the methods that there are"
    ),
    "speculative_method=eagle": Absent(
        "EAGLE heads of the first two generations are not read", "take an EAGLE-3 head (method 'eagle3')"
    ),
    "speculative_method=medusa": Absent(
        "Medusa heads are not read", "take 'mlp_speculator', 'eagle3' or 'draft_model'"
    ),
    "speculative_method=ngram_gpu": Absent(
        "n-grams are looked up by the core, beside the device", "take 'ngram'"
    ),
    "tokenizer_mode=mistral": Absent(
        "the library mistral_common is not used",
        "'auto' reads tokenizer.json, 'slow' the model's tokenizer by transformers",
    ),
}
"""Values of options that exist, as "option=value". They are refused."""

REQUEST_FIELDS: Mapping[str, Absent] = {
    **{
        f"{kind}.{name}": absent
        for kind in ("ChatRequest", "CompletionRequest")
        for name, absent in (
            ("guided_decoding_backend", OPTIONS["guided_decoding_backend"]),
            ("kv_transfer_params", OPTIONS["kv_transfer_config"]),
        )
    },
    "CompletionRequest.mm_processor_kwargs": Absent(
        "a completion has no pictures or sounds", "send messages with them to /v1/chat/completions"
    ),
    **{
        f"{kind}.{name}": absent
        for kind in ("CountTokensRequest", "MessagesRequest")
        for name, absent in (
            ("container", Absent("the server runs no code", "give a tool that runs it")),
            ("mcp_servers", Absent("the server calls no tools", "call them and send a tool_result")),
        )
    },
    **{
        f"OllamaOptions.{name}": Absent(
            "the model was loaded when the server started", "give options of `pagewire serve`", warned=kind
        )
        for kind, names in (
            (int, ("main_gpu", "num_batch", "num_gpu", "num_thread")),
            (bool, ("embedding_only", "f16_kv", "logits_all", "low_vram", "numa", "use_mlock", "use_mmap")),
            (bool, ("vocab_only",)),
        )
        for name in names
    },
    "OllamaOptions.mirostat": Absent("there is no Mirostat", "give top_p or min_p", silent=(0,)),
    "OllamaOptions.mirostat_eta": Absent("there is no Mirostat", "give top_p or min_p", warned=int | float),
    "OllamaOptions.mirostat_tau": Absent("there is no Mirostat", "give top_p or min_p", warned=int | float),
    "OllamaOptions.num_keep": Absent(
        "of a conversation that is too long, whole turns are left out", "leave it out", warned=int
    ),
    "OllamaOptions.penalize_newline": Absent(
        "penalties are those of all tokens", "set repeat_penalty to 1", silent=(True,)
    ),
    "OllamaOptions.tfs_z": Absent("there is no tail-free sampling", "give min_p", silent=(1.0,)),
    "OllamaOptions.typical_p": Absent("there is no typical sampling", "give top_p or min_p", silent=(1.0,)),
    "OllamaGenerateRequest.context": Absent(
        "an answer has no context that a request could continue", "send the conversation to /api/chat"
    ),
    "OllamaGenerateRequest.template": Absent(
        "templates are Jinja, and the server's (--chat-template)",
        "give raw and a prompt with all of its marks",
        silent=("",),
    ),
    "ResponsesRequest.stream_id": Absent(
        "a WebSocket has one response at a time", "open another one for what runs at the same time"
    ),
    "ChatRequest.metadata": Absent("nothing is stored", "the log names the user of a request", warned=dict),
    "ChatRequest.prediction": Absent(
        "the text of a prediction is not read", "the engine's speculative_model proposes tokens", warned=dict
    ),
    "ChatRequest.store": Absent(
        "chats are not stored", "/v1/responses keeps its responses", silent=(False,), warned=(True,)
    ),
}
"""Fields of HTTP requests, as "type of the request.field"; types are those of /openapi.json."""

_CODE = Absent("code never crosses a socket", "call a worker's method by name with collective_rpc")
_FROM_OPTIONS = Absent(
    "an engine is made from its options", "use from_engine_args(EngineArgs(...)), or attach(address)"
)
_INPUTS = Absent(
    "a prompt becomes a request within the call that takes it", "preprocess_chat and get_tokenizer show it"
)
_TOKENIZATION = Absent(
    "a prompt is tokenized as its model asks",
    "truncate_prompt_tokens shortens it, and prompt_token_ids are taken as they are",
)
NAMES: Mapping[str, Absent] = {
    "AsyncLLM(engine_use_ray)": _FROM_OPTIONS,
    "AsyncLLM(log_requests)": _FROM_OPTIONS,
    "AsyncLLM(start_engine_loop)": _FROM_OPTIONS,
    "AsyncLLM(worker_use_ray)": _FROM_OPTIONS,
    "AsyncLLM.engine_step": Absent("the core runs by itself", "generate streams a request's outputs"),
    "AsyncLLM.shutdown_background_loop": Absent("the core runs by itself", "shutdown ends it"),
    "AsyncLLM.start_background_loop": Absent(
        "the core runs by itself", "pause_generation and resume_generation hold requests back"
    ),
    "EngineArgs(disable_log_requests)": Absent(
        "an engine logs no requests", "`pagewire serve` does", silent=(True, False)
    ),
    "LLM.DEPRECATE_LEGACY": Absent(
        "older forms of arguments are taken or refused, never warned of", "leave it out"
    ),
    "LLM(hf_overrides=function)": Absent(
        "the configuration is read in other processes, and code never crosses a socket",
        "give a dict, whose values go into config.json",
    ),
    "LLM.apply_model(func)": _CODE,
    "LLM.collective_rpc(callable)": _CODE,
    "LLM.encode(tokenization_kwargs)": _TOKENIZATION,
    "LLM.encode(DataPrompt)": Absent(
        "the models of vLLM that take one bring a processor of it as a plugin, which pagewire does not load",
        "give a text, token ids, an EmbedsPrompt or multi_modal_data",
    ),
    "LLM.input_processor": _INPUTS,
    "LLM.io_processor": _INPUTS,
    "LLM.request_counter": Absent("it counts requests of this object only", "get_metrics has all"),
    "LLM.generate(max_tokens)": Absent(
        "sampling parameters are one argument", "write generate(prompts, SamplingParams(...))"
    ),
    **{
        f"LLMEngine({name})": _FROM_OPTIONS
        for name in (
            *("model_config", "cache_config", "parallel_config", "scheduler_config", "device_config"),
            *("load_config", "lora_config", "speculative_config", "decoding_config", "observability_config"),
            *("prompt_adapter_config", "executor_class", "log_stats", "usage_context", "stat_loggers"),
            *("input_registry", "step_return_finished_only", "vllm_config"),
        )
    },
    "LLMEngine.add_request(tokenization_kwargs)": _TOKENIZATION,
    "LLMEngine.DO_VALIDATE_OUTPUT": Absent(
        "the types of outputs are checked when they are decoded", "leave it out"
    ),
    "LLMEngine.get_tokenizer_group": Absent(
        "a frontend has one tokenizer, beside those of adapters", "use get_tokenizer(lora_request)"
    ),
    "LLMEngine.has_unfinished_requests_for_virtual_engine": Absent(
        "the stages of a pipeline have one scheduler", "use has_unfinished_requests()"
    ),
    "LoRARequest(lora_alpha)": Absent(
        "it is read from adapter_config.json", "write LoRARequest(lora_name, lora_int_id, lora_path)"
    ),
    "LoRARequest(lora_id)": Absent(
        "the number of an adapter is lora_int_id", "write LoRARequest(lora_name, lora_int_id, lora_path)"
    ),
    "MetricList.get": Absent(
        "metrics are a list, since several may have one name and different labels",
        "write next(m for m in metrics if m.name == name)",
    ),
    "SamplingParams(output_text_buffer_length)": Absent(
        "the frontend holds back what may be the beginning of a stop string",
        "leave it out",
        silent=(0,),
        warned=int,
    ),
    "StructuredOutputsConfig(backend)": OPTIONS["guided_decoding_backend"],
    "StructuredOutputsConfig(disable_fallback)": Absent(
        "there is one backend, so none to fall back to", "leave it out", silent=(True, False)
    ),
    "StructuredOutputsConfig(enable_in_reasoning)": Absent(
        "the server reads the reasoning", "give `pagewire serve` --enable-in-reasoning", silent=(False,)
    ),
    "StructuredOutputsConfig(reasoning_parser)": Absent(
        "the server reads the reasoning", "give `pagewire serve` --reasoning-parser", silent=("",)
    ),
    **dict.fromkeys(
        (
            *("pagewire.inputs.DummyDataFactory", "pagewire.inputs.INPUT_REGISTRY"),
            *("pagewire.inputs.InputContext", "pagewire.inputs.InputProcessor"),
            *("pagewire.inputs.InputRegistry", "pagewire.inputs.LLMInputs", "pagewire.inputs.registry"),
            *("pagewire.multimodal.MULTIMODAL_REGISTRY", "pagewire.multimodal.MultiModalInputs"),
            *("pagewire.multimodal.MultiModalPlugin", "pagewire.multimodal.MultiModalRegistry"),
            *("pagewire.multimodal.base", "pagewire.multimodal.image", "pagewire.multimodal.registry"),
        ),
        Absent(
            "media become a model's inputs by the Hugging Face processor of its folder, in processes of its own",
            "put a processor into the model's folder, and its arguments into mm_processor_kwargs",
        ),
    ),
    "StructuredOutputsParams(json=shape)": Absent(
        'a dict such as {"name": "string"} is no JSON schema, and what it means would be a guess',
        "give the schema, which the error writes out",
    ),
    "pagewire.bc_linter_include": Absent("it marks functions for a linter of vLLM", "leave it out"),
    "pagewire.bc_linter_skip": Absent("it marks functions for a linter of vLLM", "leave it out"),
    "pagewire.distributed": Absent(
        "the ranks of a model are workers, whose groups no program joins",
        "set tensor_parallel_size or pipeline_parallel_size; `pagewire doctor --distributed` tries the links",
    ),
    "pagewire.model_executor": Absent(
        "models are modules of transformers, which workers load, and safetensors files are mapped into memory",
        "register a class of your own with ModelRegistry (docs/own_models.md); for Tensorizer's files take "
        "save_sharded_state and load_format='sharded_state'",
    ),
}
"""Attributes, as "owner.name", and arguments, as "function(name)". They are refused, but for silent values."""

_STATISTICS = Absent("usage statistics are never collected", "there is nothing to opt out of")
_ONE_SET_OF_KERNELS = "each device has one set of attention kernels, of this project"
_COMPILED_AT_RUN_TIME = Absent(
    "nothing is compiled at installation",
    "kernels come with the wheel, or are compiled when they are first needed",
)
_RAY_WORKERS = Absent(
    "workers in a Ray cluster get their steps as other workers do, over sockets",
    "set distributed_executor_backend='ray'",
)
_OPENVINO = Absent("OpenVINO is not used", "set PAGEWIRE_CPU_KVCACHE_SPACE, kv_cache_dtype and quantization")
_TORCH_COMPILE = Absent("torch.compile is not used", "kernels are written ahead")

VARIABLES: Mapping[str, Absent] = {
    "CMAKE_BUILD_TYPE": _COMPILED_AT_RUN_TIME,
    "HOST_IP": Absent("other programs have this name as well", "set PAGEWIRE_HOST_IP"),
    "CUDA_HOME": Absent(
        "kernels are compiled by NVRTC, from a Python package", "install pagewire[cuda12] or [cuda13]"
    ),
    "DO_NOT_TRACK": _STATISTICS,
    "LD_LIBRARY_PATH": Absent("NCCL is the one that PyTorch brings", "install another PyTorch"),
    "LOCAL_RANK": Absent(
        "the core numbers its workers", "a worker that joins takes its number from RANK or LWS_WORKER_INDEX"
    ),
    "MAX_JOBS": _COMPILED_AT_RUN_TIME,
    "NVCC_THREADS": _COMPILED_AT_RUN_TIME,
    "VERBOSE": _COMPILED_AT_RUN_TIME,
    "VLLM_ALLOW_ENGINE_USE_RAY": Absent(
        "the engine core is a process of its own without Ray", "set distributed_executor_backend='ray'"
    ),
    "VLLM_ATTENTION_BACKEND": Absent(
        _ONE_SET_OF_KERNELS, "PAGEWIRE_CPU_ISA=reference computes with PyTorch alone"
    ),
    "VLLM_CONFIG_ROOT": Absent(
        "there is no folder of configuration files", "--config names a file of options"
    ),
    "VLLM_DO_NOT_TRACK": _STATISTICS,
    "VLLM_DYNAMO_USE_CUSTOM_DISPATCHER": _TORCH_COMPILE,
    "VLLM_FUSED_MOE_CHUNK_SIZE": Absent(
        "the experts of a step run as one call", "max_num_batched_tokens limits its tokens"
    ),
    "VLLM_INSTANCE_ID": Absent(
        "processes of an engine find each other by its address", "the log names it: listening on ipc://..."
    ),
    "VLLM_NCCL_SO_PATH": Absent("NCCL is the one that PyTorch brings", "install another PyTorch"),
    "VLLM_NO_DEPRECATED_WARNING": Absent(
        "no warning is about deprecation", "PAGEWIRE_LOGGING_LEVEL=ERROR hides all warnings"
    ),
    "VLLM_NO_USAGE_STATS": _STATISTICS,
    "VLLM_OPENVINO_CPU_KV_CACHE_PRECISION": _OPENVINO,
    "VLLM_OPENVINO_ENABLE_QUANTIZED_WEIGHTS": _OPENVINO,
    "VLLM_OPENVINO_KVCACHE_SPACE": _OPENVINO,
    "VLLM_RINGBUFFER_WARNING_INTERVAL": Absent(
        "workers get messages over sockets, not by a ring of buffers", "leave it out"
    ),
    "VLLM_TARGET_DEVICE": Absent(
        "one package serves CPUs and GPUs", "pagewire[cuda12] or [cuda13] adds what GPUs need"
    ),
    "VLLM_TEST_DYNAMO_GRAPH_CAPTURE": _TORCH_COMPILE,
    "VLLM_TEST_FORCE_FP8_MARLIN": Absent(
        "Marlin's kernels are not used", "fp8 checkpoints have kernels of this project"
    ),
    "VLLM_TRACE_FUNCTION": Absent(
        "functions of remote processes are not traced", "start_profile and stop_profile trace the workers"
    ),
    "VLLM_USAGE_SOURCE": _STATISTICS,
    "VLLM_USAGE_STATS_SERVER": _STATISTICS,
    "VLLM_USE_FLASHINFER_SAMPLER": Absent(
        "FlashInfer is not used", "tokens are sampled by kernels of this project"
    ),
    "VLLM_USE_PRECOMPILED": _COMPILED_AT_RUN_TIME,
    "VLLM_USE_RAY_COMPILED_DAG": _RAY_WORKERS,
    "VLLM_USE_RAY_COMPILED_DAG_NCCL_CHANNEL": _RAY_WORKERS,
    "VLLM_USE_RAY_SPMD_WORKER": _RAY_WORKERS,
    "VLLM_USE_TRITON_AWQ": Absent("Triton is not used", "AWQ checkpoints have kernels of this project"),
    "VLLM_USE_TRITON_FLASH_ATTN": Absent("Triton is not used", _ONE_SET_OF_KERNELS),
    "VLLM_USE_V1": Absent("there is one engine", "leave it out"),
    "VLLM_WORKER_MULTIPROC_METHOD": Absent(
        "workers are programs of their own, neither forked nor spawned by multiprocessing", "leave it out"
    ),
    "VLLM_XLA_CACHE_PATH": Absent("TPUs are not served", "use 'cuda' or 'cpu' as device"),
}
"""Environment variables. Those that begin with VLLM_ are warned of; others belong to other programs as well."""

FOUNDATIONS: Mapping[str, Absent] = {
    "Block copy kernels (copy_blocks, swap_blocks)": Absent(
        "sequences share only full blocks of the KV cache, which nothing writes again, so none is copied within "
        "it; copies to the swap space need no kernel of their own",
        "nothing is to be set",
    ),
    "CUDA 11": Absent("NVRTC and CuPy are those of CUDA 12 and 13", "install pagewire[cuda12] or [cuda13]"),
    "FlashAttention, FlashInfer, xFormers": Absent(
        _ONE_SET_OF_KERNELS, "they are compared with FlashInfer's in benchmarks.kernels"
    ),
    "GPUs before compute capability 8.0": Absent(
        "the kernels need instructions of 8.0", "use the CPU, or a newer GPU"
    ),
    "Intel Extension for PyTorch": Absent(
        "CPUs have kernels of this project, for AVX2, AVX-512, AMX and NEON", "nothing is to be installed"
    ),
    "Python 3.8, 3.9": Absent("they get no more fixes", "use Python 3.10 to 3.14"),
    "ROCm, TPU, Neuron, XPU, OpenVINO": Absent(
        "their devices are not served", "use an NVIDIA GPU, or a CPU (x86, ARM)"
    ),
    "Systems other than Linux": Absent(
        "processes rely on Linux (process groups, /proc, ipc sockets)", "use a container or WSL"
    ),
    "Usage statistics": _STATISTICS,
}
"""Hardware, software and services that pagewire does without."""
