"""Requests with `use_beam_search`: each is a search over requests of one token.

    BeamRequest: prompts, params --> outputs of one token each --> advance --> ... --> RequestOutput

`LLM` runs the steps of all searches of a batch together (`complete_beams`), `AsyncLLM` those of one (`search`),
`LLMEngine` those that its `step` finds ready (`EngineSearches`), and a server those of an HTTP request
(`beam_batch.py`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from pagewire.frontend.core.mailbox import Inbox
from pagewire.frontend.core.session import Session
from pagewire.frontend.requests.beam_search import (
    add_text,
    beam_steps,
    completion,
    end_tokens,
    search_params,
    tokens_prompt,
)
from pagewire.frontend.requests.checked_params import truncate_tokens
from pagewire.frontend.requests.lora import LoRARequest
from pagewire.frontend.requests.outputs import CompletionOutput, RequestOutput, RequestState
from pagewire.frontend.text.prompts import PromptType, TokensPrompt, text_of
from pagewire.ipc.wire.params import SamplingParams

GenerateAll: TypeAlias = Callable[..., AsyncGenerator[list[tuple[int, RequestOutput]], None]]


class BeamRequest:
    """One request, as the steps of its search.

    Attributes:
        request_id: the caller's id. prompts: to be extended by one token each. params: with which.

    Raises:
        ValueError, TypeError: a bad prompt, parameter or adapter.
    """

    def __init__(
        self,
        session: Session,
        prompt: PromptType,
        params: SamplingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
    ) -> None:
        self.request_id = request_id
        self._params = session.intake.check(params).params
        self._tokenizer = session.intake.tokenizer_for(lora_request)
        self._adapter, self._text = lora_request, text_of(prompt)
        limit = session.info.max_model_len
        token_ids = session.intake.token_ids(prompt, params.truncate_prompt_tokens is not None, lora_request)
        self._prompt = tokens_prompt(prompt, truncate_tokens(token_ids, params, limit))
        self._search = search_params(self._params, limit)
        self._steps = beam_steps(
            [self._prompt],
            self._search,
            ends=end_tokens(self._search, session.intake.eos_token_id, session.info.generation_config),
            max_model_len=limit,
            max_logprobs=session.info.max_logprobs,
            edits=self._params,
        )
        self.prompts: list[TokensPrompt]
        self.params: SamplingParams
        self.prompts, self.params = next(self._steps)

    def advance(self, outputs: list[RequestOutput]) -> RequestOutput | None:
        """Take the outputs of all prompts, in order. Returns the result once the search has ended."""
        try:
            self.prompts, self.params = self._steps.send(outputs)
        except StopIteration as stop:
            return self._result(stop.value[0])
        return None

    def failed(self) -> RequestOutput:
        """The result of a search that the engine has ended with an error."""
        return self._output([CompletionOutput(0, "", [], finish_reason="error")])

    def _result(self, beams: list[Any]) -> RequestOutput:
        params, best = self._params, beams[: self._params.n]
        for beam in best:
            tokenizer = self._tokenizer if params.detokenize else None
            add_text(
                beam,
                self._search,
                tokenizer,
                params.skip_special_tokens,
                params.spaces_between_special_tokens,
            )
        return self._output([completion(index, beam) for index, beam in enumerate(best)])

    def _output(self, completions: list[CompletionOutput]) -> RequestOutput:
        for part in completions:
            part.lora_request = self._adapter
        prompt_ids = self._prompt["prompt_token_ids"]
        return RequestOutput(
            self.request_id, self._text, prompt_ids, None, completions, True, lora_request=self._adapter
        )


async def search(generate_all: GenerateAll, request: BeamRequest, **options: Any) -> RequestOutput:
    """Run the steps of a search. generate_all: of `AsyncLLM`. options: its keyword arguments.

    Raises:
        as `AsyncLLM.generate`.
    """
    result = None
    while result is None:
        finals: dict[int, RequestOutput] = {}
        async for outputs in generate_all(request.prompts, request.params, request.request_id, **options):
            finals.update(outputs)
        result = request.advance([finals[index] for index in range(len(request.prompts))])
    return result


class RunningSearch:
    """A search, and the requests of its step. options: of `Intake.prepare`, by keyword."""

    def __init__(self, request: BeamRequest, **options: Any) -> None:
        self.request, self.options = request, options
        self.states: list[RequestState] = []
        self.outputs: dict[int, RequestOutput] = {}  # by key


class EngineSearches:
    """The searches among the requests of an `LLMEngine`. inbox: that of its other requests."""

    def __init__(self, session: Session, inbox: Inbox) -> None:
        self._session, self._inbox = session, inbox
        self._running: dict[str, RunningSearch] = {}
        self._by_key: dict[int, RunningSearch] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running

    def add(self, request: BeamRequest, trace_headers: Mapping[str, str] | None, **options: Any) -> None:
        """Begin a search. options: of `Intake.prepare`."""
        running = RunningSearch(request, **options)
        self._running[request.request_id] = running
        try:
            self._submit(running, trace_headers)
        except BaseException:
            del self._running[request.request_id]
            raise

    def take(self, state: RequestState) -> RequestOutput | None:
        """Take what is new of a request in the inbox; the result if it was the last of its search."""
        if (running := self._by_key.get(state.key)) is None:
            return None
        if (output := self._session.take(state)) is None:
            return None
        del self._by_key[state.key]
        running.outputs[state.key] = output
        if state.error is not None:
            self.abort([running.request.request_id])
            return running.request.failed()
        if len(running.outputs) < len(running.states):
            return None
        result = running.request.advance([running.outputs[state.key] for state in running.states])
        if result is None:
            self._submit(running, None)
        else:
            del self._running[result.request_id]
        return result

    def abort(self, request_ids: Sequence[str]) -> None:
        """End searches without a result. Unknown ids are ignored."""
        for request_id in request_ids:
            if (running := self._running.pop(request_id, None)) is not None:
                for state in running.states:
                    self._by_key.pop(state.key, None)
                self._session.abort(running.states)

    def _submit(self, running: RunningSearch, trace_headers: Mapping[str, str] | None) -> None:
        request, session = running.request, self._session
        checked = session.intake.check(request.params)
        prepared = [
            session.intake.prepare(prompt, checked, f"{request.request_id}-{index}", **running.options)
            for index, prompt in enumerate(request.prompts)
        ]
        running.states, running.outputs = session.submit(prepared, self._inbox, trace_headers), {}
        self._by_key.update({state.key: running for state in running.states})
