"""The part of `AsyncLLM` that concerns the engine as a whole, not single requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal

from pagewire.frontend import wiring
from pagewire.frontend.api.calls import AsyncEngineCalls, timed_out
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
from pagewire.frontend.core.metrics import Metric, read_metrics
from pagewire.frontend.core.session import Session
from pagewire.frontend.core.stat_loggers import status_line
from pagewire.frontend.requests.checked_params import default_sampling_params, local_sampling_params
from pagewire.frontend.requests.lora import LoRARequest
from pagewire.ipc.errors import EngineDeadError
from pagewire.ipc.wire.calls import CALLS, HealthReport, RemoteCall
from pagewire.ipc.wire.lora import LoRAConfig
from pagewire.ipc.wire.messages import EngineInfo
from pagewire.ipc.wire.params import SamplingParams

logger = logging.getLogger("pagewire.frontend")

HEALTH_SECONDS = 8.0  # longer than the core takes to say whether its worker lives


class AsyncEngine(AsyncEngineCalls):
    """The engine as a whole, for asyncio programs: calls, adapters, tokenizers, metrics, health.

    Attributes:
        session: the connection to the core, and the open requests on it.
    """

    session: Session
    attach = open_session.AttachMethod(open_session.attach)

    async def get_metrics(self) -> list[Metric]:
        """A snapshot of the core's metrics, over all its frontends."""
        return read_metrics(await asyncio.wrap_future(self.session.call("metrics")))

    async def do_log_stats(self) -> None:
        """Log the core's state in one line, and call the program's own loggers of statistics."""
        logger.info("%s", status_line(await asyncio.wrap_future(self.session.call("status"))))
        await asyncio.to_thread(self.session.stat_loggers.log)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Add an adapter to the engine; see `LLM.add_lora`."""
        adding = await asyncio.to_thread(self.session.add_lora, lora_request)
        return bool(await asyncio.wrap_future(adding))

    async def update_weights(
        self,
        weights: str | PathLike[str] | Mapping[str, Any],
        version: str = "",
        requests: Literal["finish", "recompute", "abort"] = "finish",
    ) -> str:
        """Let the model have other weights from now on; see `LLM.update_weights`."""
        updating = asyncio.to_thread(wiring.send_weights, self.session.call, weights, version, requests)
        return str(await asyncio.wrap_future(await updating))

    async def get_tokenizer(self, lora_request: LoRARequest | None = None) -> Any:
        """The tokenizer of the frontend, or of an adapter; see `LLM.get_tokenizer`."""
        return wiring.for_programs(await asyncio.to_thread(self.session.intake.tokenizer_for, lora_request))

    async def get_model_config(self) -> ModelConfig:
        """The model, with vLLM's names; `info` has more."""
        return model_config(self.session.info)

    async def get_parallel_config(self) -> ParallelConfig:
        """How the model is split."""
        return parallel_config(self.session.info)

    async def get_scheduler_config(self) -> SchedulerLimits:
        """Limits of the scheduler."""
        return scheduler_config(self.session.info)

    async def get_decoding_config(self) -> DecodingConfig:
        """How structured output is made."""
        return DecodingConfig()

    async def get_lora_config(self) -> LoRAConfig | None:
        """The limits of adapters; None if the engine serves none."""
        return self.session.info.lora

    @property
    def info(self) -> EngineInfo:
        """The model, its sizes and the options of the core, as the core reported them."""
        return self.session.info

    @property
    def default_params(self) -> SamplingParams:
        """The sampling parameters that the model recommends."""
        return default_sampling_params(self.info)

    @property
    def local_params(self) -> SamplingParams:
        """Those where people talk to a model; see `local_sampling_params`."""
        return local_sampling_params(self.info)

    async def check_health(self) -> None:
        """Return if the engine is proven to live: every worker took a step or answered a ping within seconds.

        Raises:
            EngineDeadError: it does not; the message gives the cause.
        """
        report = await self.health()
        if not report["alive"]:
            raise EngineDeadError(report["reason"])

    async def health(self) -> HealthReport:
        """The core's answer to `check_health`: "alive" and "ready", truth values, and the "reason" if not both.

        Raises:
            EngineDeadError: the core is lost, does not answer, or answers with something else.
        """
        if self.dead_error is not None:
            raise EngineDeadError(*self.dead_error.args)
        answer = asyncio.wrap_future(self.session.call("check_health"))
        try:
            report: HealthReport = CALLS["check_health"].answer(
                await asyncio.wait_for(answer, HEALTH_SECONDS)
            )
            return report
        except asyncio.TimeoutError:
            text = f"the engine core has not said for {HEALTH_SECONDS:g} s whether it is healthy"
            raise EngineDeadError(text) from None
        except EngineDeadError:
            raise
        except Exception as error:  # of any type: a core that answers so is not proven to live
            raise EngineDeadError(f"the engine core does not say whether it is healthy: {error}") from None

    @property
    def limit_concurrency(self) -> int:
        """Largest number of sequences that run at the same time."""
        return self.info.max_num_seqs

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The error by which the core was lost; None while it runs."""
        return self.session.dead

    @property
    def errored(self) -> bool:
        """True once the core is lost."""
        return self.dead_error is not None

    @property
    def is_running(self) -> bool:
        """True until the core is lost or `shutdown` is called."""
        return self.dead_error is None

    @property
    def is_stopped(self) -> bool:
        """The contrary of `is_running`."""
        return not self.is_running

    async def _answer(self, call: RemoteCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        timeout = call.local(args, kwargs).get("timeout")
        answer = asyncio.wrap_future(self.session.call(call.name, *args, **kwargs))
        try:
            return await asyncio.wait_for(answer, timeout)
        except asyncio.TimeoutError:
            if timeout is None:  # the call itself failed with it
                raise
            raise timed_out(call, args, kwargs, timeout) from None
