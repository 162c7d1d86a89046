"""The calls about pictures and sound: what stands for one in a prompt, and what is kept of them."""

from __future__ import annotations

from pagewire.engine_core.clients.frontend_call import FrontendCall


class MediaControl:
    """Runs the calls `media_layout` and `reset_mm_cache`."""

    def media_layout(self, caller: FrontendCall, kind: str, shape: list[int], options: str) -> None:
        """Answer the tokens that stand for a medium of this shape.

        Raises:
            ValueError: the engine takes no media of this kind.
        """
        raise ValueError(f"this engine takes no media of kind {kind[:40]!r}")

    def reset_mm_cache(self, caller: FrontendCall) -> None:
        """Forget what is kept of media; answers once it is done."""
        caller.reply(None)
