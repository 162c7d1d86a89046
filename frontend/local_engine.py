"""What `LLM` and `LLMEngine` have in common beside the calls of the core."""

from __future__ import annotations

from pagewire.frontend.configs import (
    DecodingConfig,
    ParallelConfig,
    SchedulerConfig,
    parallel_config,
    scheduler_config,
)
from pagewire.frontend.lora import LoRARequest
from pagewire.frontend.session import Session
from pagewire.frontend.text.tokenizer import Tokenizer
from pagewire.ipc.calls import EngineCalls
from pagewire.ipc.lora import LoRAConfig
from pagewire.ipc.messages import EngineInfo


class LocalEngine(EngineCalls):
    """An engine for callers that wait: the calls of `EngineCalls`, adapters and tokenizers."""

    @property
    def session(self) -> Session:
        """The connection to the core."""
        raise NotImplementedError

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter now, and let requests of any frontend of the engine name it without its path.

        An adapter that was added under the same name is replaced; its requests finish with the old one. Returns
        True once it was read. Without this call, an adapter is read when the first request gives its path.

        Raises:
            ValueError, TypeError: no such adapter, one that does not fit the model, or an id that is in use.
            PermissionError: the frontend is not one of the engine's own user on its machine.
        """
        return bool(self.session.add_lora(lora_request).result())

    def get_tokenizer(self, lora_request: LoRARequest | None = None) -> Tokenizer | None:
        """The light tokenizer of the frontend, or of an adapter that has one of its own.

        None with `skip_tokenizer_init`. `transformers.AutoTokenizer` on `info.tokenizer` gives theirs.

        Raises:
            ValueError, TypeError: no such adapter.
        """
        return self.session.tokenizer_for(lora_request)

    def get_model_config(self) -> EngineInfo:
        """The model, its sizes and the options of the core, as the core reported them."""
        return self.session.info

    def get_parallel_config(self) -> ParallelConfig:
        """How the model is split."""
        return parallel_config(self.session.info)

    def get_scheduler_config(self) -> SchedulerConfig:
        """Limits of the scheduler."""
        return scheduler_config(self.session.info)

    def get_decoding_config(self) -> DecodingConfig:
        """How structured output is made."""
        return DecodingConfig()

    def get_lora_config(self) -> LoRAConfig | None:
        """The limits of adapters; None if the engine serves none."""
        return self.session.info.lora
