"""The engine step by step: add requests, call `step` until nothing is unfinished."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pagewire.frontend import wiring
from pagewire.frontend.api.beam_requests import BeamRequest, EngineSearches
from pagewire.frontend.api.local_engine import LocalEngine
from pagewire.frontend.core import open_session
from pagewire.frontend.core.mailbox import Inbox
from pagewire.frontend.core.session import Session
from pagewire.frontend.core.stat_loggers import (
    StatLoggerBase,
    check_loggers,
    ignore_usage_context,
    status_line,
)
from pagewire.frontend.requests.lora import LoRARequest
from pagewire.frontend.requests.outputs import RequestOutput, RequestState
from pagewire.frontend.requests.prompt_adapters import PromptAdapterRequest, refuse_adapter
from pagewire.frontend.text.prompts import PromptType
from pagewire.ipc.bounds import check_number, meta_of, within
from pagewire.ipc.compatibility import NAMES, settle
from pagewire.ipc.wire.params import Age, SamplingParams
from pagewire.ipc.wire.pooling import PoolingParams

if TYPE_CHECKING:
    from typing_extensions import Self

    from pagewire.ipc.options.engine_args import EngineArgs

logger = logging.getLogger("pagewire.frontend")

TRACE_HEADERS = {"traceparent", "tracestate", "baggage"}  # those of W3C, in lower case


class LLMEngine(LocalEngine):
    """An engine core, and the requests this object has open on it.

    Made by `from_engine_args`, which spawns a core, or `attach`. The calls that act on the engine as a whole
    (`sleep`, `reset_prefix_cache`, `collective_rpc`, ...) are those of `LocalEngine`. All methods raise
    `EngineDeadError`, with the cause, once the core is lost. One thread at a time may `step`; the other methods are
    safe in any thread.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._inbox = Inbox()
        self._unfinished: dict[str, RequestState] = {}
        self._searches = EngineSearches(session, self._inbox)
        self._close = weakref.finalize(self, session.close)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: Any = None,
        stat_loggers: Mapping[str, StatLoggerBase] | None = None,
        *,
        restarts: int = 0,
    ) -> LLMEngine:
        """Spawn a core and wait until it is ready.

        usage_context: has no effect (a warning says so): usage statistics are never collected.
        stat_loggers: the program's own loggers of statistics by name, called beside the core's own log line
            (which `disable_log_stats` turns off).
        restarts: how often to replace the core, should it die.

        Raises:
            ValueError, TypeError: bad options, or a model that cannot be loaded. ModelNotFoundError: no such model.
            EngineDeadError: the core failed while it started; the text is the cause.
        """
        ignore_usage_context(usage_context)
        return cls(open_session.spawn(engine_args, restarts, check_loggers(stat_loggers)))

    @classmethod
    def _over(cls, session: Session) -> Self:
        return cls(session)

    # -------------------------------------------------------------- requests

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        *,
        prompt_adapter_request: PromptAdapterRequest | None = None,
    ) -> None:
        """Send a request to the core, where it starts at once; `step` returns its outputs.

        arrival_time: when the request arrived, a time of `time.monotonic()`; None: now. Latencies in outputs,
            metrics and traces count from it. Equal priorities run in the order in which they are added, though.
        lora_request: the adapter to use.
        trace_headers: W3C trace context of the parent of the request's span; the sixth argument may be it as well.
        prompt_adapter_request: embeddings to put before the prompt of a request that generates.

        Raises:
            ValueError, TypeError: a bad prompt, parameter or adapter, an id in use, or an arrival time to come.
        """
        if tokenization_kwargs and tokenization_kwargs.keys() <= TRACE_HEADERS and trace_headers is None:
            tokenization_kwargs, trace_headers = None, tokenization_kwargs
        settle(
            "tokenization_kwargs", tokenization_kwargs, NAMES["LLMEngine.add_request(tokenization_kwargs)"]
        )
        if request_id in self._unfinished or request_id in self._searches:
            raise ValueError(f"request id {request_id!r} is in use")
        age = age_of(arrival_time)
        if isinstance(params, PoolingParams):
            refuse_adapter(prompt_adapter_request)
            checked = wiring.complete_pooling_params(params, self.info, None, None)
            prepared = wiring.prepare_pooling(
                self.session.intake, prompt, checked, request_id, priority, age, lora_request
            )
        elif params.use_beam_search:
            request = BeamRequest(self.session, prompt, params, request_id, lora_request)
            options = {"lora_request": lora_request, "prompt_adapter_request": prompt_adapter_request}
            self._searches.add(request, trace_headers, priority=priority, age=age, **options)
            return
        else:
            prepared = self.session.intake.prepare(
                prompt, params, request_id, priority, age, lora_request, prompt_adapter_request
            )
        (self._unfinished[request_id],) = self.session.submit([prepared], self._inbox, trace_headers)

    def step(self) -> list[RequestOutput]:
        """Wait for new output and return it, one per request; [] at once if no request is unfinished.

        The core does not wait for this call: all tokens since the last one come merged. A request that the core
        ended with an error has the finish reason "error".
        """
        outputs: list[RequestOutput] = []
        while self.has_unfinished_requests() and not outputs:
            for state in self._inbox.get():
                if (found := self._searches.take(state)) is not None:
                    outputs.append(found)
                    continue
                if self._unfinished.get(state.request.request_id) is not state:
                    continue  # aborted
                if (output := self.session.take(state)) is not None:
                    outputs.append(output)
                    if output.finished:
                        del self._unfinished[output.request_id]
        return outputs

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End one or several requests; `step` returns no further outputs of them. Unknown ids are ignored."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self._searches.abort(ids)
        self.session.abort([self._unfinished.pop(name) for name in ids if name in self._unfinished])

    def has_unfinished_requests(self) -> bool:
        """True while there is a request whose last output `step` has yet to return."""
        return self.get_num_unfinished_requests() > 0

    def get_num_unfinished_requests(self) -> int:
        """How many requests there are whose last output `step` has yet to return."""
        return len(self._unfinished) + len(self._searches)

    # -------------------------------------------------------------- the engine as a whole

    def do_log_stats(self) -> None:
        """Log the core's state in one line, and call the program's own loggers of statistics."""
        logger.info("%s", status_line(self.session.call("status").result()))
        self.session.stat_loggers.log()

    @property
    def model_executor(self) -> LLMEngine:
        """This engine: programs call `save_sharded_state` there."""
        return self

    def shutdown(self) -> None:
        """Detach; a core that was spawned here is stopped. May be called twice."""
        self._close()


def age_of(arrival_time: float | None) -> float:
    """Return the seconds since a time of `time.monotonic()`; 0 for None.

    Raises:
        TypeError: it is not a number. ValueError: it is negative, still to come, or too long ago.
    """
    if arrival_time is None:
        return 0.0
    now, limit = time.monotonic(), meta_of(Age).le
    check_number("arrival_time", arrival_time, 0.0, math.inf)
    if not within(age := now - arrival_time, meta_of(Age)):
        raise ValueError(
            f"arrival_time must be a time of time.monotonic() (now {now:.0f}) within the last {limit:.0f} s, "
            f"got {arrival_time:.0f}"
        )
    return age
