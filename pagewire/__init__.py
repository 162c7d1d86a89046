"""pagewire: LLM inference and serving in separate processes.

What a program needs is here; each name is loaded when it is first used, so that importing costs nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagewire.frontend.api.async_llm import AsyncLLM, AsyncLLMEngine
    from pagewire.frontend.api.llm import LLM
    from pagewire.frontend.api.llm_engine import LLMEngine
    from pagewire.frontend.api.model_registry import ModelRegistry
    from pagewire.frontend.core.stat_loggers import StatLoggerBase
    from pagewire.frontend.requests.beam_search import BeamSearchOutput, BeamSearchSequence
    from pagewire.frontend.requests.inputs import is_embeds_prompt, is_tokens_prompt
    from pagewire.frontend.requests.lora import LoRARequest
    from pagewire.frontend.requests.outputs import CompletionOutput, RequestOutput
    from pagewire.frontend.requests.pooling.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from pagewire.frontend.requests.prompt_adapters import PromptAdapterRequest
    from pagewire.frontend.text.prompts import (
        ChatTemplateContentFormatOption,
        DataPrompt,
        EmbedsPrompt,
        ExplicitEncoderDecoderPrompt,
        PromptType,
        SingletonPrompt,
        TextPrompt,
        TokensPrompt,
    )
    from pagewire.ipc.errors import (
        EngineBusyError,
        EngineDeadError,
        ModelNotFoundError,
        ProtocolError,
        RequestError,
        WeightsChangedError,
    )
    from pagewire.ipc.options.engine_args import AsyncEngineArgs, EngineArgs
    from pagewire.ipc.options.ray_cluster import initialize_ray_cluster
    from pagewire.ipc.version import __version__, __version_tuple__
    from pagewire.ipc.wire.items import RetainedPrefix, Retention
    from pagewire.ipc.wire.params import (
        BeamSearchParams,
        GuidedDecodingParams,
        RequestOutputKind,
        SamplingParams,
        SamplingType,
        StructuredOutputsParams,
    )
    from pagewire.ipc.wire.pooling import PoolerConfig, PoolingParams, PoolingTask

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ChatTemplateContentFormatOption",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "DataPrompt",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "EngineArgs",
    "EngineBusyError",
    "EngineDeadError",
    "ExplicitEncoderDecoderPrompt",
    "GuidedDecodingParams",
    "LLMEngine",
    "LoRARequest",
    "ModelNotFoundError",
    "ModelRegistry",
    "PoolerConfig",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PoolingTask",
    "PromptAdapterRequest",
    "PromptType",
    "ProtocolError",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "RetainedPrefix",
    "Retention",
    "SamplingParams",
    "SamplingType",
    "ScoringOutput",
    "ScoringRequestOutput",
    "SingletonPrompt",
    "StatLoggerBase",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "WeightsChangedError",
    "__version__",
    "__version_tuple__",
    "initialize_ray_cluster",
    "is_embeds_prompt",
    "is_tokens_prompt",
]

_HOMES = {
    "pagewire.frontend.api.async_llm": ("AsyncLLM", "AsyncLLMEngine"),
    "pagewire.frontend.requests.beam_search": ("BeamSearchOutput", "BeamSearchSequence"),
    "pagewire.frontend.requests.inputs": (
        "is_embeds_prompt",
        "is_tokens_prompt",
    ),
    "pagewire.frontend.api.llm": ("LLM",),
    "pagewire.frontend.api.llm_engine": ("LLMEngine",),
    "pagewire.frontend.api.model_registry": ("ModelRegistry",),
    "pagewire.frontend.requests.lora": ("LoRARequest",),
    "pagewire.frontend.requests.outputs": ("CompletionOutput", "RequestOutput"),
    "pagewire.frontend.requests.pooling.outputs": (
        "ClassificationOutput",
        "ClassificationRequestOutput",
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
        "PoolingOutput",
        "PoolingRequestOutput",
        "ScoringOutput",
        "ScoringRequestOutput",
    ),
    "pagewire.frontend.requests.prompt_adapters": ("PromptAdapterRequest",),
    "pagewire.frontend.core.stat_loggers": ("StatLoggerBase",),
    "pagewire.frontend.text.prompts": (
        "ChatTemplateContentFormatOption",
        "DataPrompt",
        "EmbedsPrompt",
        "ExplicitEncoderDecoderPrompt",
        "PromptType",
        "SingletonPrompt",
        "TextPrompt",
        "TokensPrompt",
    ),
    "pagewire.ipc.errors": (
        "EngineBusyError",
        "EngineDeadError",
        "ModelNotFoundError",
        "ProtocolError",
        "RequestError",
        "WeightsChangedError",
    ),
    "pagewire.ipc.options.engine_args": ("AsyncEngineArgs", "EngineArgs"),
    "pagewire.ipc.wire.params": (
        "BeamSearchParams",
        "GuidedDecodingParams",
        "RequestOutputKind",
        "SamplingParams",
        "SamplingType",
        "StructuredOutputsParams",
    ),
    "pagewire.ipc.wire.items": ("RetainedPrefix", "Retention"),
    "pagewire.ipc.wire.pooling": ("PoolerConfig", "PoolingParams", "PoolingTask"),
    "pagewire.ipc.options.ray_cluster": ("initialize_ray_cluster",),
    "pagewire.ipc.version": ("__version__", "__version_tuple__"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        from pagewire.ipc.compatibility import absent_name

        raise absent_name(__name__, name)
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value  # asked for once
    return value


class _AbsentNames:
    """The last finder of modules, which finds none: it refuses names of vLLM, with the reason and the alternative.

    Python asks it for `import x.y` where there is no module x.y, and for `from x import y` where the package x has
    no attribute y. `x.y` and `hasattr(x, "y")` ask `x.__getattr__` alone, which raises AttributeError.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        # Where a part of pagewire itself is missing, its name is not looked up in what that part would have.
        if name.startswith(f"{__name__}.") and not name.startswith(f"{__name__}.ipc"):
            from pagewire.ipc.compatibility import NAMES

            if (absent := NAMES.get(name)) is not None:
                raise ModuleNotFoundError(absent.refusal(name))  # with `name=`, `from x import y` ignores it


sys.meta_path.append(_AbsentNames)


def __dir__() -> list[str]:
    return sorted(__all__)
