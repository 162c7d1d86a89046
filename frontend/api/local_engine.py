"""The part of `LLM` and `LLMEngine` that concerns the engine as a whole, not single requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from os import PathLike
from typing import Any, Literal

from pagewire.frontend import wiring
from pagewire.frontend.api.calls import timed_out
from pagewire.frontend.api.configs import (
    DecodingConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerLimits,
    model_config,
    parallel_config,
    scheduler_config,
)
from pagewire.frontend.core import open_session
from pagewire.frontend.core.metrics import Metric
from pagewire.frontend.core.session import Session
from pagewire.frontend.requests.lora import LoRARequest
from pagewire.ipc.wire.calls import EngineCalls, RemoteCall
from pagewire.ipc.wire.lora import LoRAConfig
from pagewire.ipc.wire.messages import EngineInfo


class LocalEngine(EngineCalls):
    """The engine as a whole, for callers that wait: the calls of `EngineCalls`, adapters, tokenizers, metrics.

    Attributes:
        session: the connection to the core, and the open requests on it.
    """

    session: Session
    attach = open_session.AttachMethod(open_session.attach)

    @property
    def info(self) -> EngineInfo:
        """The model, its sizes and the options of the core, as the core reported them."""
        return self.session.info

    def get_metrics(self) -> list[Metric]:
        """A snapshot of the core's metrics, over all its frontends."""
        return self.session.get_metrics(timeout=None)

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Use another tokenizer, ours or one of transformers, for requests from now on."""
        self.session.intake.set_tokenizer(tokenizer)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter now, and let requests of any frontend of the engine name it without its path.

        An adapter that was added under the same name is replaced; its requests finish with the old one. Returns
        True once it was read. Without this call, an adapter is read when the first request gives its path.

        Raises:
            ValueError, TypeError: no such adapter, one that does not fit the model, or an id that is in use.
            PermissionError: the frontend is not one of the engine's own user on its machine.
        """
        return bool(self.session.add_lora(lora_request).result())

    def update_weights(
        self,
        weights: str | PathLike[str] | Mapping[str, Any],
        version: str = "",
        requests: Literal["finish", "recompute", "abort"] = "finish",
    ) -> str:
        """Let the model have other weights from now on, all or none of those that are given; returns their version.

        weights: a safetensors file, or a folder of some, below the engine's option `weights_dir`; or tensors of
            PyTorch or NumPy by name. Names and shapes are those of the checkpoint's files; what is not given stays.
        version: a name that outputs say (`CompletionOutput.weights_versions`); by default the update's number.
        requests: those that run, of all frontends, finish first with the old weights, while new ones wait; or
            go on with the new ones, their tokens computed anew ("recompute"); or end with `WeightsChangedError`
            ("abort").

        Raises:
            ValueError: the model has no such tensor, or one of another shape; or its weights cannot be replaced.
                Nothing is changed. TypeError: what is no tensor of float32, float16 or bfloat16.
            PermissionError: the path does not lie below `weights_dir`, or this frontend may not control the engine.
            EngineBusyError: another update is going on, or the engine sleeps.
            RuntimeError: workers were lost or failed; those that replace them have the old weights.
        """
        return str(wiring.send_weights(self.session.call, weights, version, requests).result())

    def get_tokenizer(self, lora_request: LoRARequest | None = None) -> Any:
        """The tokenizer of the frontend, or of an adapter that has one of its own.

        An `EngineTokenizer`, which has the usual members of those of transformers; one of transformers where the
        frontend uses that (`set_tokenizer`, `tokenizer_mode="slow"`); None with `skip_tokenizer_init`.

        Raises:
            ValueError, TypeError: no such adapter.
        """
        return wiring.for_programs(self.session.intake.tokenizer_for(lora_request))

    def get_model_config(self) -> ModelConfig:
        """The model, with vLLM's names; `info` has more."""
        return model_config(self.session.info)

    def get_parallel_config(self) -> ParallelConfig:
        """How the model is split."""
        return parallel_config(self.session.info)

    def get_scheduler_config(self) -> SchedulerLimits:
        """Limits of the scheduler."""
        return scheduler_config(self.session.info)

    def get_decoding_config(self) -> DecodingConfig:
        """How structured output is made."""
        return DecodingConfig()

    def get_lora_config(self) -> LoRAConfig | None:
        """The limits of adapters; None if the engine serves none."""
        return self.session.info.lora

    def _answer(self, call: RemoteCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        timeout = call.local(args, kwargs).get("timeout")
        try:
            return self.session.call(call.name, *args, **kwargs).result(timeout)
        except FutureTimeoutError:
            if timeout is None:  # the call itself failed with it
                raise
            raise timed_out(call, args, kwargs, timeout) from None
