"""Offline inference: all prompts in, all outputs back, in order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from pagewire.frontend import wiring
from pagewire.frontend.api.batch import complete_or_search, search_beams
from pagewire.frontend.api.configs import ModelConfig
from pagewire.frontend.api.llm_engine import LLMEngine
from pagewire.frontend.api.offline_pooling import OfflinePooling
from pagewire.frontend.api.progress import progress_bar
from pagewire.frontend.core.session import Session
from pagewire.frontend.requests.beam_search import BeamSearchOutput
from pagewire.frontend.requests.checked_params import default_sampling_params, params_for
from pagewire.frontend.requests.inputs import prompts_of
from pagewire.frontend.requests.lora import LoRARequest, for_each
from pagewire.frontend.requests.outputs import RequestOutput
from pagewire.frontend.requests.prompt_adapters import PromptAdapterRequest
from pagewire.frontend.text.prompts import PromptType, TextPrompt, TokensPrompt
from pagewire.ipc.compatibility import NAMES
from pagewire.ipc.wire.params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from typing_extensions import Self

    from pagewire.frontend.requests.decisions import Decision


class LLM(OfflinePooling):
    """A model for offline inference: spawns an engine core, and ends it with `shutdown`, at the end of a
    `with` block, or when collected. The calls that act on the engine as a whole (`sleep`, `reset_prefix_cache`,
    `collective_rpc`, ...) are those of `LocalEngine`. Methods are safe to call from several threads at once.

    Options are those of `EngineArgs`, and refused as it says. `restarts`: how often to replace a core that dies;
    open requests go on in the new one.

    All methods raise `EngineDeadError`, with the cause, once the core is lost.

    Raises:
        ValueError, TypeError: bad options, or a model that cannot be loaded. ModelNotFoundError: no such model.
        EngineDeadError: the core failed while it started; the text is the cause.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        runner: str = "auto",
        convert: str = "auto",
        tokenizer: str | None = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        allowed_local_media_path: str = "",
        allowed_media_domains: list[str] | None = None,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        quantization: str | None = None,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        seed: int | None = None,
        gpu_memory_utilization: float = 0.9,
        swap_space: float | None = None,
        cpu_offload_gb: float = 0,
        enforce_eager: bool = False,
        disable_custom_all_reduce: bool = False,
        hf_token: bool | str | None = None,
        hf_overrides: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        pooler_config: Any = None,
        override_pooler_config: Any = None,
        structured_outputs_config: Any = None,
        kv_cache_memory_bytes: int | None = None,
        compilation_config: Any = None,
        logits_processors: Any = None,
        restarts: int = 0,
        **kwargs: Any,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in NOT_OPTIONS}
        # Outputs come whole, so gaps between tokens do not matter, and steps need no limit of time.
        options |= {"seed": seed or 0, "hf_overrides": hf_overrides or {}, "max_step_ms": 0, **kwargs}
        args = wiring.EngineArgs.from_kwargs(options)
        self._use(LLMEngine.from_engine_args(args, restarts=restarts))

    @classmethod
    def _over(cls, session: Session) -> Self:
        llm = cls.__new__(cls)
        llm._use(LLMEngine(session))
        return llm

    def _use(self, engine: LLMEngine) -> None:
        self.llm_engine = engine
        self.session = engine.session
        self._request_ids = itertools.count()

    # -------------------------------------------------------------- generation

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: list[int] | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        **unknown: NoReturn,
    ) -> list[RequestOutput]:
        """Complete all prompts; the outputs are in their order.

        prompts: a string, token ids, a `TextPrompt`, `TokensPrompt` or `EmbedsPrompt`, or a list of these.
        sampling_params: for all, or one for each; None: the model's defaults.
        prompt_token_ids: legacy spelling of token ids as `prompts`.
        use_tqdm: show a progress bar; or what to make it with.
        lora_request: the adapter for all prompts, or a list with one or None for each.
        priority: one value per prompt; lower runs earlier, under the policy "priority".
        prompt_adapter_request: embeddings to put before each prompt.

        Raises:
            ValueError, TypeError: a bad prompt, parameter or adapter; nothing is left running.
            BatchError: (a `RequestError`) the engine ended requests with an error. The others were finished
                first; the exception has all `outputs`. It is a ValueError, too, if the first such request was
                refused for what it asks, such as a malformed grammar.
        """
        for name in unknown:
            raise unknown_argument(name)
        if (prompts is None) == (prompt_token_ids is None):
            raise ValueError("give prompts")
        prompts = prompts_of(prompt_token_ids if prompts is None else prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = params_for(sampling_params, len(prompts))
        if priority is not None and len(priority) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(priority)} priorities")
        adapters = for_each(lora_request, len(prompts))
        order = [0] * len(prompts) if priority is None else priority
        with progress_bar(len(prompts), use_tqdm) as tick:
            return complete_or_search(
                self.session, prompts, params, order, adapters, self._next_id, tick, prompt_adapter_request
            )

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        *,
        prompt_adapter_request: PromptAdapterRequest | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several; a list of outputs in either case.

        Raises:
            ValueError: no chat template, or a template that refuses the messages. And as `generate`.
        """
        prompts = self.preprocess_chat(
            messages,
            chat_template,
            chat_template_content_format,
            add_generation_prompt,
            continue_final_message,
            tools,
            chat_template_kwargs,
            mm_processor_kwargs,
            lora_request,
        )
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            prompt_adapter_request=prompt_adapter_request,
        )

    def preprocess_chat(
        self,
        messages: Sequence[Any],
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[TokensPrompt]:
        """The prompts that `chat` would send, one per conversation; an adapter's own template and tokens count.

        Raises:
            ValueError: no chat template, a template that refuses the messages, or no tokenizer.
        """
        conversations = wiring.conversations_of(messages)
        tokenizers = [
            self.session.intake.tokenizer_for(r) for r in for_each(lora_request, len(conversations))
        ]
        prompts: list[TokensPrompt] = wiring.chat_prompts(
            tokenizers,
            conversations,
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            prompts_tools=True,
            chat_template_kwargs=chat_template_kwargs,
            media=self.session.info.media,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        return prompts

    def decide(
        self,
        state: Any,
        questions: Mapping[str, Any],
        instructions: str | None = None,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> dict[str, Decision]:
        """Answer typed questions about a state with the probability of each answer, and no text.

        state: a text, or what JSON can express.
        questions: by ids of the caller's: `ChoiceQuestion`, `YesOrNoQuestion` or `RatingQuestion` of
            `frontend.requests.decisions`, or the objects that `/v1/systemone` takes.
        instructions: about all questions. chat_template, chat_template_kwargs: as for `chat`; `enable_thinking` is
            false for templates that read it, unless the latter say otherwise.

        Raises:
            ValueError, TypeError: a malformed question, no chat template, or labels that are not one token each.
        """
        asked = wiring.questions_of(questions)
        if (tokenizer := self.session.intake.tokenizer_for(lora_request)) is None:
            raise ValueError("decisions need a tokenizer: the engine runs with skip_tokenizer_init")
        rows = [wiring.AskedQuestion(each, tokenizer) for each in asked.values()]
        messages = [[{"role": "user", "content": row.message(state, instructions)}] for row in rows]
        variables = wiring.decision_variables(tokenizer, chat_template, chat_template_kwargs)
        prompts = self.preprocess_chat(
            messages, chat_template, chat_template_kwargs=variables, lora_request=lora_request
        )
        prepared = [row.prepare(prompt) for row, prompt in zip(rows, prompts, strict=True)]
        reads, params = wiring.reads_of(prepared)
        outputs = self.generate(reads, params, use_tqdm=False, lora_request=lora_request)
        return dict(zip(asked, wiring.decisions_of(prepared, outputs), strict=True))

    def beam_search(
        self,
        prompts: Sequence[TokensPrompt | TextPrompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the `params.beam_width` best continuations of each prompt, best first.

        concurrency_limit: largest number of prompts searched at once; None: all.

        Raises:
            ValueError, TypeError: a prompt or parameter is invalid, or the engine's `max_logprobs` is too small.
        """

        def generate(
            prompts: list[TokensPrompt], params: SamplingParams, adapter: LoRARequest | None
        ) -> list[RequestOutput]:
            return self.generate(prompts, params, use_tqdm=False, lora_request=adapter)

        plain = prompts_of(prompts)
        adapters = for_each(lora_request, len(plain))
        with progress_bar(len(plain), use_tqdm) as tick:
            return search_beams(
                self.session, plain, params, adapters, generate, concurrency_limit, lambda: tick(None)
            )

    def apply_model(self, func: Callable[..., Any]) -> list[Any]:
        """Code never crosses a socket: use `collective_rpc` with the name of a worker's method.

        Raises:
            TypeError: always.
        """
        raise TypeError(NAMES["LLM.apply_model(func)"].refusal("LLM.apply_model"))

    # -------------------------------------------------------------- the engine as a whole

    @property
    def model_config(self) -> ModelConfig:
        """The model, with vLLM's names; `info` has more."""
        return self.get_model_config()

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters that the model's generation config recommends."""
        return default_sampling_params(self.info)

    def shutdown(self) -> None:
        """Detach; a core that was spawned here is stopped. May be called twice."""
        self.llm_engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()


NOT_OPTIONS = {"self", "kwargs", "restarts", "__class__"}


def unknown_argument(name: str) -> TypeError:
    """The error for an argument that `LLM.generate` does not have. It says where one of `SamplingParams` goes."""
    if name in SamplingParams.__struct_fields__:
        return TypeError(NAMES["LLM.generate(max_tokens)"].refusal(f"LLM.generate({name}=...)"))
    return TypeError(f"LLM.generate() got an unexpected keyword argument {name!r}")
