"""The calls about pictures and sound: what stands for one in a prompt, and what is kept of them."""

from __future__ import annotations

import msgspec

from pagewire.engine_core.calls.frontend_call import FrontendCall
from pagewire.engine_core.media.encoder_cache import EncoderCache
from pagewire.engine_core.metrics.reports import ReportedEngine
from pagewire.ipc.tenants import check_tenant
from pagewire.ipc.wire.media import MediaLayout, check_kind


class MediaControl:
    """Runs the calls `media_layout` and `reset_mm_cache`."""

    def __init__(self, core: ReportedEngine) -> None:
        self._core = core

    def media_layout(
        self, caller: FrontendCall, kind: str, shape: list[int], options: str, tenant: str
    ) -> None:
        """Answer the tokens that stand for a medium of this shape.

        Raises:
            ValueError: the engine takes no such medium, or no tenant has such a name. EngineBusyError: too many
                requests with media wait.
        """
        if tenant:
            check_tenant(tenant)
        if (media := self._core.media) is None:
            return check_kind(None, kind, shape)

        def done(outcome: MediaLayout | Exception) -> None:
            if isinstance(outcome, Exception):
                caller.refuse(outcome)
            else:
                caller.reply(msgspec.to_builtins(outcome))

        media.lay((kind, tuple(shape), options), tenant or caller.identity, caller.identity, done)
        return None

    def reset_mm_cache(self, caller: FrontendCall) -> None:
        """Forget what is kept of media; answers once it is done."""
        if self._core.media is not None:
            self._core.media.reset()
        if (encoder := self._core.scheduler.kv.group(EncoderCache)) is not None:
            encoder.reset()
        caller.reply(None)
